"""The second tier of tests: what `make test` leaves out and `make test-all` and CI run.

Left out are tests that take long, or that need programs besides Python. Single tests of other files
carry `@pytest.mark.extended`. Whole models run on the best instruction set only in the first tier
(`tests/compiled/conftest.py`), and a dozen of transformers' architectures
(`tests/integrations/test_architectures.py`).
"""

EXTENDED = (
    # A browser, clients in other languages, terminals, Ray, and processes that are killed.
    "page/",
    "clients/",
    "cli/test_terminal.py",
    "fleet/test_ray.py",
    "fleet/test_shared_sessions.py",
    "shared/test_kills.py",
    # Commands in processes of their own.
    "bench/",
    "cli/test_doctor.py",
    "cli/test_durable.py",
    "cli/test_grid.py",
    "cli/test_default_calibration.py",
    "cli/test_process.py",
    "cli/test_remote.py",
    "cli/test_serve.py",
    "cli/test_start.py",
    "test_docs.py",
    "test_typing.py",
    # Many models, or the default model on long texts.
    "compiled/test_families.py",
    "compiled/test_gemma4.py",
    "integrations/test_generate.py",
    "integrations/test_transformers_cache.py",
    "integrations/test_transformers_folder.py",
    "models/test_gguf_experts.py",
    "server/test_isolation.py",
    "store/test_continuation.py",
    "store/test_prefix.py",
    "test_torch_defaults.py",
    "test_compression_quality.py",
    "test_compute_thread.py",
    "test_quality.py",
    "test_real_edits.py",
    "test_real_invariants.py",
    "test_streaming_reference.py",
    "test_atomic_calls.py",
    # Damaged files by the thousands.
    "fuzz/",
)
