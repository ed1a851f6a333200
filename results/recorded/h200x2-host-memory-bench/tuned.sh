# nccltune 0.1.0: NCCL settings for bench, TP 2, on 2x NVIDIA H200
# For `. ./tuned.sh` in a POSIX shell before the server starts; docker, systemd and compose read tuned.env instead.
# HOST-MEMORY: measured with GPU peer access switched off, so every message went through host memory; it says nothing about a server that uses peer access
# machine: 2x NVIDIA H200, driver 580.159.04, Intel(R) Xeon(R) Processor
# NCCL: 2.28.9 (SHA-256 1c8618b86673...) at /opt/nccl/libnccl.so.2
# machine fingerprint: dc41872f18992802dbe3b4df0d72aa5aab96129d841d36c05c56b563bab08ac4
# workload: bench, TP 2, batches 1, 3, 16 and 32, no speculation, engine torch
# verdict: adopt: 16.9 % less time in collectives per pass (95 % interval 16.7 % to 17.2 %), 13 paired launches against the default
# forward pass: in a forward pass shaped like the model 8.6 % less time (95 % interval 7.9 % to 9.2 %), 12 paired launches
# memory: 0 MiB more device memory per rank, 1544 MiB more host memory (estimated)
# date: 2026-11-29T23:00:02Z
# seed: 1
# holds only while: NCCL_NVLS_ENABLE=0 (was set where nccltune was started)
# holds only while: NCCL_P2P_DISABLE=1 (pinned by the user, set below)
#
# Makes NCCL set up at least this many channels, which only messages large enough to fill them will use (part of the winning combination, not measured alone)
export NCCL_MIN_NCHANNELS='32'
#
# Sets the largest number of threads per channel for the LL and Simple protocols (in the search -17.5 % against the default with it, -16.3 % with the other variables alone)
export NCCL_NTHREADS='256'
#
# Sets how many bytes a thread must have before NCCL uses another channel: lower numbers spread small messages over more channels (in the search -17.5 % against the default with it, -12.2 % with the other variables alone)
export NCCL_THREAD_THRESHOLDS='-1-1-1+2'
#
# Stops GPUs from writing into each other's memory, so that data goes through host memory (pinned by the user)
export NCCL_P2P_DISABLE='1'
