# nccltune 0.1.0: NCCL settings for kimi-k2.5, TP 2, on 2x NVIDIA H200
# For `. ./tuned.sh` in a POSIX shell before the server starts; docker, systemd and compose read tuned.env instead.
# HOST-MEMORY: measured with GPU peer access switched off, so every message went through host memory; it says nothing about a server that uses peer access
# machine: 2x NVIDIA H200, driver 580.159.04, Intel(R) Xeon(R) Processor
# NCCL: 2.28.9 (SHA-256 1c8618b86673...) at /opt/nccl/libnccl.so.2
# machine fingerprint: 9787a2f22352e64d4df6125bd9d5e10718113417c7748006a925f4dc68a7c152
# workload: kimi-k2.5, TP 2, batches 1, 4 and 16, 4 verify tokens per sequence, engine sglang
# verdict: adopt: 16.4 % less time in the measured collectives per pass (95 % interval 15.9 % to 16.8 %), 13 paired launches against the default
# forward pass: in a forward pass shaped like the model 3.3 % less time (95 % interval 2.8 % to 3.8 %), 4 paired launches
# memory: 0 MiB more device memory per rank, 374 MiB more host memory (estimated)
# not measured, so not covered: all-gather bf16 of 1,310,720 bytes (logits, 4 rows); all-gather bf16 of 5,242,880 bytes (logits, 16 rows); all-gather bf16 of 20,971,520 bytes (logits, 64 rows); all-gather bf16 of 327,680 bytes (prefill: logits of a sequence's last token)
# date: 2026-11-30T02:55:15Z
# seed: 1
# holds only while: CUDA_DEVICE_MAX_CONNECTIONS=8 (sglang sets it itself)
# holds only while: NCCL_CUMEM_ENABLE=0 (sglang sets it itself)
# holds only while: NCCL_NVLS_ENABLE=0 (was set where nccltune was started)
# holds only while: NCCL_P2P_DISABLE=1 (pinned by the user, set below)
#
# Sets the size of the buffer between two ranks for the Simple protocol, per channel (in the search -17.4 % against the default with it, -16.0 % with the other variables alone)
export NCCL_BUFFSIZE='1048576'
#
# Makes NCCL set up at least this many channels, which only messages large enough to fill them will use (part of the winning combination; no arm of the search lacks it alone)
export NCCL_MIN_NCHANNELS='16'
#
# Stops GPUs from writing into each other's memory, so that data goes through host memory (pinned by the user)
export NCCL_P2P_DISABLE='1'
