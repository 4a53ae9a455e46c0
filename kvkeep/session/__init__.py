"""A live KV cache of one text, with its token ids, policy, sampler, pins and spans."""
