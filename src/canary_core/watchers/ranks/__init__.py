"""Whether tensor-parallel ranks of one engine compute the same batches, sample the same tokens and hold the same KV."""
