"""A stand-in for `vllm serve`: what is seen of vLLM 0.32.0 on the CPU from outside, without a model.

It is no vLLM: caches, counters and processes follow the rules observed on the real engine, times are sleeps.
Whatever is measured on it is evidence `standin`.
"""
