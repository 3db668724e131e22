"""Eight host devices and a compilation cache for every test, set before JAX is imported; fewer garbage collections."""

import gc
import os
from pathlib import Path

# Tests run each program a few times at most, so that most of their time is compiling. Machine code in one piece that
# LLVM does not optimise, and the older emitter of fusions, make it several times faster. The HLO, its collectives, its
# memory and XLA's counts of operations and bytes are the same.
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    "--xla_cpu_parallel_codegen_split_count": "1",
    "--xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
}
_CACHE = Path(__file__).resolve().parents[1] / ".cache" / "jax"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
for flag, value in _FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()
# Most of the suite's time is XLA compiling; the second run on a machine takes it from disk.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Traced programs, and the test files while they are read, are many small objects that live long. Python's default
# visits them all after each 700 new ones, which takes an eighth of the suite's time and a fifth of its start.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish() -> None:
    """Lets no garbage be looked for among what was imported."""
    gc.collect()
    gc.freeze()
