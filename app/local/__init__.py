"""The embedded trainer: real Megatron and a real sampler as gloo ranks on one machine."""
