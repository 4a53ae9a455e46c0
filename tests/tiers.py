"""The second tier of tests: what `make test` leaves out and `make test-all` and CI run.

Left out are tests that take long, or that need programs besides Python: folders, files, tests or
single cases. Other tests carry `@pytest.mark.extended`. Whole models run on the best instruction
set only in the first tier (`tests/compiled/conftest.py`), and a dozen of transformers'
architectures (`tests/integrations/test_architectures.py`).

`FIRST` names tests of such files that `make test` runs nevertheless, as they cover code that no
other quick test does.
"""

from fnmatch import fnmatchcase

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
    # Single slow tests, and slow cases of tests whose other cases are in the first tier.
    "cache/test_observer.py::test_queries_follow_rewinds_failures_and_forks",
    "compiled/test_experts.py::test_logits_are_the_same_on_any_number_of_threads[avx512bf16-gemma4",
    "engine/test_engine.py::test_deep_in_a_prompt_steps_are_halved_and_reuse_is_exact",
    "engine/test_engine.py::test_generations_continue_during_a_long_change",
    "engine/test_registry.py::test_many_generations_do_not_grow_memory",
    "models/test_families.py::test_bounded_logits_equal_the_naive_reference[gemma4-experts]",
    "server/test_default_sampling.py::test_no_default_is_greedy",
    "test_chat.py::test_default_sampling_is_the_models",
    "test_chat.py::test_the_system_prompt_is_never_evicted",
    "models/test_gguf_tokenizer.py::test_default_model_tokenizes_as_in_transformers",
    "models/test_source.py::test_two_processes_convert_once",
    "shared/test_sessions.py::test_injected_faults_lose_and_repeat_no_commit[100",
    "store/test_round_trip.py::test_another_process_continues_bit_exactly[sliding-empty-seeded-no",
    "test_edit_costs.py::test_many_small_edits_do_not_leave_many_segments[full",
    "test_edit_places.py::test_an_agent_can_replace_its_pinned_tool_result_for_ever[sliding-200",
    "models/test_families.py::test_bounded_logits_equal_the_naive_reference[gemma3n-as-published]",
    "models/test_families.py::test_bounded_logits_equal_the_naive_reference[gemma4-experts-shared]",
    "models/test_source.py::test_killed_conversion_leaves_no_visible_model[packed.safetensors]",
    "models/test_source.py::test_killed_conversion_leaves_no_visible_model[kvkeep.json]",
    "shared/test_protocol.py::test_no_schedule_loses_or_repeats_a_confirmed_commit[a writer that r",
    "store/test_round_trip.py::test_another_process_continues_bit_exactly[ragged",
    "test_edit_costs.py::test_long_segments_that_were_cut_say_what_the_naive_memory_says[full",
    "test_edit_costs.py::test_long_segments_that_were_cut_say_what_the_naive_memory_says[shift",
)

# Patterns of fnmatch, without brackets, which it has a meaning for.
FIRST = (
    "cli/test_doctor.py::test_the_text_output",
    "cli/test_grid.py::test_every_task_is_measured_shown_and_drawn",
    "cli/test_remote.py::test_a_named_chat_resumes",
    "cli/test_remote.py::test_every_branch_of_a_named_chat_is_saved",
    "cli/test_terminal.py::test_regenerate_clear_save_and_set",
    "cli/test_terminal.py::test_tab_completes_commands_turns_settings_and_files",
    "fleet/test_shared_sessions.py::*folder?",
    "integrations/test_transformers_cache.py::test_padding_never_becomes_tokens",
    "integrations/test_transformers_cache.py::test_recurrent_states_are_saved_and_forked_but*",
    "integrations/test_transformers_cache.py::test_unsupported_*",
)


def is_extended(test: str) -> bool:
    """Whether a test, as "folder/file.py::name[case]", is left out of the first tier."""
    return test.startswith(EXTENDED) and not any(fnmatchcase(test, name) for name in FIRST)
