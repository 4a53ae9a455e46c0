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
    "test_edit_costs.py::test_many_small_edits_do_not_leave_many_segments[full",
    "test_edit_places.py::test_an_agent_can_replace_its_pinned_tool_result_for_ever[sliding-200",
    "models/test_families.py::test_bounded_logits_equal_the_naive_reference[gemma4-experts-shared]",
    "models/test_source.py::test_killed_conversion_leaves_no_visible_model[packed.safetensors]",
    "models/test_source.py::test_killed_conversion_leaves_no_visible_model[kvkeep.json]",
    "shared/test_protocol.py::test_no_schedule_loses_or_repeats_a_confirmed_commit[a writer that r",
    "test_edit_costs.py::test_long_segments_that_were_cut_say_what_the_naive_memory_says[full",
    "test_edit_costs.py::test_long_segments_that_were_cut_say_what_the_naive_memory_says[shift",
    "cli/test_own_model.py::test_commands_pull_a_gguf_file_from_the_hub",
    "cli/test_store.py::test_sessions_are_copied_checked_and_removed_in_a_store[s3",
    "models/test_families.py::test_bfloat16_streams_are_as_close_to_float32_as_transformers[gemma3n",
    "models/test_families.py::test_bounded_logits_equal_the_naive_reference[gemma3n",
    "models/test_families.py::test_converted_model_equals_transformers_on_the_same_weights",
    "models/test_families.py::test_logits_equal_transformers[gemma3n-as-published",
    "models/test_families.py::test_logits_equal_transformers[gemma4-experts",
    "server/test_chat.py::test_the_async_client_sends_concurrent_requests",
    "shared/test_sessions.py::test_two_writers_lose_and_repeat_nothing_in_1000_schedules[memory",
    "store/test_damage.py::test_a_flipped_bit_of_the_payload_is_refused[zstd",
    "test_edit_costs.py::test_many_edits_copy_fewer_cells_than_are_held_times_edits[delete",
    "compiled/test_real_model.py::test_four_bit_weights_have_the_perplexity_of_their_unpacked_values",
    "engine/test_engine.py::test_after_a_rewind_or_fork_only_prefilled_tokens_are_reused[fork",
    "engine/test_engine.py::test_an_evicted_session_continues_to_the_bit",
    "engine/test_engine.py::test_concurrent_generations_do_not_change_each_other",
    "integrations/test_architectures.py::test_bounded_logits_equal_streaming_with_the_models_own_attention[24-4-g",
    "integrations/test_transformers_cache_use.py::test_a_copied_cache_is_a_fork[deepcopy",
    "store/test_round_trip.py::test_another_process_continues_bit_exactly",
    "test_imports.py::test_importing_kvkeep_restores_the_garbage_collector_setting[True",
    "test_pins.py::test_any_range_can_be_pinned",
    "test_pins.py::test_pinned_tokens_stay_while_many_windows_are_fed[5",
    "test_reconstruction.py::test_scores_of_the_default_model_are_close_to_float32[contribution",
    "test_sampling.py::test_filters_pass_the_likeliest_in_proportion[how2",
    "test_sampling.py::test_filters_pass_the_likeliest_in_proportion[how3",
    "test_sampling.py::test_filters_pass_the_likeliest_in_proportion[how7",
    "test_self_extend.py::test_logits_equal_the_longlm_reference[7",
    "test_self_extend.py::test_logits_equal_the_longlm_reference[100",
    "test_setup.py::test_a_build_without_a_compiler_succeeds_and_doctor_gives_the_reason",
    "test_spans.py::test_a_span_holds_what_took_the_place_of_its_own_tokens",
    "test_storage_bytes.py::test_storage_is_at_most_nine_eighths_of_the_budget[archive by heads-8",
    "test_storage_bytes.py::test_storage_is_at_most_nine_eighths_of_the_budget[full",
    "test_storage_bytes.py::test_storage_is_at_most_nine_eighths_of_the_budget[self_extend-8",
    "test_storage_bytes.py::test_storage_is_at_most_nine_eighths_of_the_budget[shift",
    "test_storage_bytes.py::test_storage_is_at_most_nine_eighths_of_the_budget[sliding-8",
    "test_trim.py::test_trimmed_code_is_loaded_again_when_it_runs",
    "test_turn_spans.py::test_spans_are_what_was_said_and_can_be_replaced[chatml",
    "test_turn_spans.py::test_spans_are_what_was_said_and_can_be_replaced[llama3, ",
    "test_turn_spans.py::test_spans_are_what_was_said_and_can_be_replaced[mistral",
    "test_usable_threads.py::test_torch_is_limited_to_the_quota_unless_a_number_was_chosen[max",
    "test_usable_threads.py::test_torch_is_limited_to_the_quota_unless_a_number_was_chosen[150000-environment2",
    "test_usable_threads.py::test_torch_is_limited_to_the_quota_unless_a_number_was_chosen[150000-environment3",
)

# Patterns of fnmatch, without brackets, which it has a meaning for.
FIRST = (
    "cli/test_doctor.py::test_the_text_output",
    "cli/test_grid.py::test_every_task_is_measured_shown_and_drawn",
    "cli/test_remote.py::test_a_named_chat_resumes",
    "cli/test_remote.py::test_every_branch_of_a_named_chat_is_saved",
    "cli/test_terminal.py::test_regenerate_clear_save_and_set",
    "fleet/test_shared_sessions.py::*folder?",
    "integrations/test_transformers_cache.py::test_padding_never_becomes_tokens",
    "integrations/test_transformers_cache.py::test_recurrent_states_are_saved_and_forked_but*",
    "integrations/test_transformers_cache.py::test_unsupported_*",
)


def is_extended(test: str) -> bool:
    """Whether a test, as "folder/file.py::name[case]", is left out of the first tier."""
    return test.startswith(EXTENDED) and not any(fnmatchcase(test, name) for name in FIRST)
