"""Expert layout, its commit in live Megatron state, and the execution of planned rows."""
