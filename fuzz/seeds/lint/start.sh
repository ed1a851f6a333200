export NCCL_ALGO=Ring NCCL_PROTO='LL,Simple' # both
mpirun -np 8 -x NCCL_MIN_NCHANNELS=32 \
  -x NCCL_DEBUG ./server
cat > file <<EOF
NCCL_MIN_NCHANNELS=1
EOF
