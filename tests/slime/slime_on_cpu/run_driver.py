"""Run a slime driver under real Ray on the CPU: `run_driver.py MODULE [slime arguments]`.

MODULE is `train` (slime's own train.py), or `app.slime_train` / `app.slime_train_async`. Prints
DRIVER_DONE at the end.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys

from slime_on_cpu.install import install
from slime_on_cpu.router import start_router


def main() -> None:
    install()
    if os.environ.get("ROUTEPACK_TEST_FP32"):
        _parse_as_fp32()
    module_name = sys.argv[1]
    sys.argv = [module_name, *sys.argv[2:]]
    if os.environ.get("ROUTEPACK_TEST_ROUTER"):
        sys.argv += ["--sglang-router-ip", "127.0.0.1", "--sglang-router-port", str(start_router())]
    # Ray would start idle workers ahead of need, each of which imports torch.
    # Its worker niceness of 15 starves on a machine that others use too.
    for name in ("prestart_worker_first_driver", "enable_worker_prestart", "worker_niceness"):
        os.environ[f"RAY_{name}"] = "0"
    import ray

    num_gpus = int(os.environ.get("ROUTEPACK_TEST_GPUS", "2"))
    inherited = ("ROUTEPACK_TEST_", "SLIME_", "PYTHONPATH")
    ray.init(
        num_cpus=3 + num_gpus,
        num_gpus=num_gpus,
        include_dashboard=False,
        object_store_memory=512 * 2**20,
        runtime_env={
            "worker_process_setup_hook": "slime_on_cpu.install.install",
            "env_vars": {
                "TORCHDYNAMO_DISABLE": "1",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                "HF_HUB_OFFLINE": "1",
                "WANDB_MODE": os.environ.get("WANDB_MODE", "disabled"),
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                **{k: v for k, v in os.environ.items() if k.startswith(inherited)},
            },
        },
    )
    if rename := os.environ.get("ROUTEPACK_TEST_RENAME"):
        module_of, _, name = rename.rpartition(".")
        owner = importlib.import_module(module_of)
        setattr(owner, name + "_v2", getattr(owner, name))
    module = importlib.import_module(module_name)
    if rename:
        delattr(owner, name)
    if hasattr(module, "main"):
        module.main()
    else:
        from slime.utils.arguments import parse_args

        module.train(parse_args())
    print("DRIVER_DONE", flush=True)
    ray.shutdown()


def _parse_as_fp32() -> None:
    """slime turns bf16 on for everybody; exact comparisons want fp32."""
    import slime.utils.arguments as arguments
    import torch

    parse = arguments.parse_args

    @functools.wraps(parse)
    def parse_fp32(*args, **kwargs):
        parsed = parse(*args, **kwargs)
        parsed.bf16, parsed.params_dtype = False, torch.float32
        return parsed

    arguments.parse_args = parse_fp32


if __name__ == "__main__":
    main()
