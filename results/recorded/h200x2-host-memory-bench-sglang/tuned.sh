# nccltune 0.1.0: NCCL settings for bench, TP 2, on 2x NVIDIA H200
# For `. ./tuned.sh` in a POSIX shell before the server starts; docker, systemd and compose read tuned.env instead.
# HOST-MEMORY: measured with GPU peer access switched off, so every message went through host memory; it says nothing about a server that uses peer access
# machine: 2x NVIDIA H200, driver 580.159.04, Intel(R) Xeon(R) Processor
# NCCL: 2.28.9 (SHA-256 1c8618b86673...) at /opt/nccl/libnccl.so.2
# machine fingerprint: 9787a2f22352e64d4df6125bd9d5e10718113417c7748006a925f4dc68a7c152
# workload: bench, TP 2, batches 1, 3, 16 and 32, no speculation, engine sglang
# verdict: adopt: 17.5 % less time in collectives per pass (95 % interval 17.1 % to 17.9 %), 4 paired launches against the default
# forward pass: in a forward pass shaped like the model 8.2 % less time (95 % interval 7.3 % to 9.1 %), 4 paired launches
# memory: 0 MiB more device memory per rank, 662 MiB more host memory (estimated)
# date: 2026-11-30T03:03:54Z
# seed: 1
# holds only while: CUDA_DEVICE_MAX_CONNECTIONS=8 (sglang sets it itself)
# holds only while: NCCL_CUMEM_ENABLE=0 (sglang sets it itself)
# holds only while: NCCL_NVLS_ENABLE=0 (was set where nccltune was started)
# holds only while: NCCL_P2P_DISABLE=1 (pinned by the user, set below)
#
# Makes NCCL set up at least this many channels, which only messages large enough to fill them will use (part of the winning combination; no arm of the search lacks it alone)
export NCCL_MIN_NCHANNELS='16'
#
# Sets how many bytes a thread must have before NCCL uses another channel: lower numbers spread small messages over more channels (part of the winning combination; no arm of the search lacks it alone)
export NCCL_THREAD_THRESHOLDS='-1-1-1+2'
#
# Stops GPUs from writing into each other's memory, so that data goes through host memory (pinned by the user)
export NCCL_P2P_DISABLE='1'
