"""Stock SGLang on a machine without a GPU: what its server needs, and nothing of it changed.

`server.py` starts and closes the server in an environment of its own (`launch/sglang_venv.sh`).
`stand_ins/` is put on the server's PYTHONPATH, and on no other: `sgl_kernel` with the two functions
that SGLang imports from its compiled CPU kernels, an empty `torchvision` for one module-level
import, and an `sglang.srt.plugins` entry point that gives the routed-experts buffer plain memory.
"""
