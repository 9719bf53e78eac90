"""Unmodified slime on a machine without a GPU: stand-ins for CUDA, SGLang's package and TE layers.

Test support only. `install.install` runs in the driver and, through Ray's
`worker_process_setup_hook`, in every Ray worker, before slime or Megatron is imported. Nothing of
slime or Megatron is edited.
"""
