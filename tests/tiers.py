"""The tiers of tests: `make test`, `make test-extended` (CI runs both), and `make test-slow`.

The second tier is what `make test` leaves out: tests that take long, or that need programs besides
Python; folders, files, tests or single cases. Other tests carry `@pytest.mark.extended`. Whole
models run on the best instruction set only in the first tier (`tests/compiled/conftest.py`), and a
few of transformers' architectures (`tests/integrations/test_architectures.py`).

`FIRST` names tests of such files that `make test` runs nevertheless, as they cover code that no
other quick test does.

The third tier runs before releases: `third_tier.py`, and tests with `@pytest.mark.slow`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase, translate
from functools import cache
from hashlib import sha256
from math import ceil

from third_tier import BEFORE_RELEASES, IN_CI

EXTENDED = (
    # A browser, clients in other languages, terminals, Ray, and processes that are killed.
    "page/",
    "clients/",
    "cli/test_terminal.py",
    "fleet/test_compaction.py",
    "fleet/test_detached.py",
    "fleet/test_ray.py",
    "fleet/test_shared_sessions.py",
    "shared/test_kills.py",
    # Commands in processes of their own.
    "bench/",
    "cli/test_doctor.py",
    "cli/test_durable.py",
    "cli/test_durable_chats.py",
    "cli/test_grid.py",
    "cli/test_default_calibration.py",
    "cli/test_process.py",
    "cli/test_prompt_files.py",
    "cli/test_remote.py",
    "cli/test_serve.py",
    "cli/test_start.py",
    "test_docs.py",
    "test_process_end.py",
    "test_typing.py",
    # Many models, or the default model on long texts.
    "chat/test_families.py",
    "compiled/test_families.py",
    "compiled/test_gemma4.py",
    "integrations/test_generate.py",
    "integrations/test_transformers_cache.py",
    "integrations/test_transformers_folder.py",
    "models/test_gguf_experts.py",
    "server/test_generated_requests.py",
    "server/test_isolation.py",
    "server/test_kills.py",
    "server/test_response_compaction.py",
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
    # Every family, format, policy and API: `FIRST` has some of each.
    "chat/test_renderer.py::test_any_conversation_is_rendered_without_control",
    "compiled/test_decoding.py::test_logits_are_as_near_to_float32_as_torch_in_bfloat16",
    "compiled/test_experts.py::test_experts_are_packed_and_routers_are_not",
    "compiled/test_ragged.py::test_logits_are_as_near_to_float32_as_torch_in_bfloat16",
    "engine/test_checkpoint_reuse.py",
    "engine/test_reuse.py::test_concurrent_random_generations",
    "engine/test_reuse.py::test_random_generations",
    "models/test_families.py::test_bounded_logits_equal_the_naive_reference",
    "models/test_families.py::test_logits_equal_transformers",
    "models/test_gguf_families.py::test_converted_folder",
    "models/test_gguf_families.py::test_fused_matrices",
    "models/test_text_part.py::test_logits_equal_transformers",
    "server/test_schemas_and_tools.py",
    "shared/test_prefixes.py",
    "shared/test_sessions.py",
    "test_state_layers.py::test_forks_and_snapshots_continue_to_the_bit",
    # Seconds for each test: chats of all APIs, long changes, sessions that move, long archives.
    "fleet/test_checkpoints.py",
    "policies/test_archive.py",
    "policies/test_archive_attention.py",
    "policies/test_archive_distances.py",
    "server/test_changes_reported.py",
    "server/test_chat_answers.py",
    "server/test_long_changes.py",
    "server/test_pins.py",
    "server/test_same_api.py",
    "server/test_session_compaction.py",
    "server/test_speculation.py",
    "server/test_stored_responses.py",
    "server/test_turns.py",
    "server/test_written_answers.py",
    # Damaged files by the thousands.
    "fuzz/",
    # Single slow tests, and slow cases of tests whose other cases are in the first tier.
    "cache/test_observer.py::test_queries_follow_rewinds_failures_and_forks",
    "compiled/test_experts.py::test_logits_are_the_same_on_any_number_of_threads[amx-gemma4",
    "compiled/test_experts.py::test_logits_are_the_same_on_any_number_of_threads[avx512bf16-gemma4",
    "engine/test_engine.py::test_deep_in_a_prompt_steps_are_halved_and_reuse_is_exact",
    "engine/test_engine.py::test_generations_continue_during_a_long_change",
    "engine/test_registry.py::test_many_generations_do_not_grow_memory",
    "compiled/test_real_model.py::test_logits_are_as_near_to_float32_as_torch[None",
    "engine/test_engine.py::test_a_failing_generation_fails_alone",
    "engine/test_engine.py::test_after_a_rewind_or_fork_only_prefilled_tokens_are_reused",
    "engine/test_engine.py::test_several_generations_share_one_prefill",
    "server/test_completions.py::test_an_echoed_prompt_has_the_log_probabilities_of_its_tokens",
    "server/test_default_sampling.py::test_no_default_is_greedy",
    "test_edits.py::test_a_restored_session_goes_on_bit_equal",
    "test_setup.py::test_a_build_prints_a_line_each_second",
    "test_turn_spans.py::test_spans_are_what_was_said_and_can_be_replaced",
    "test_chat.py::test_default_sampling_is_the_models",
    "test_chat.py::test_the_system_prompt_is_never_evicted",
    "models/test_gguf_tokenizer.py::test_default_model_tokenizes_as_in_transformers",
    "models/test_source.py::test_two_processes_convert_once",
    "shared/test_sessions.py::test_injected_faults_lose_and_repeat_no_commit[100",
    "test_edit_costs.py::test_many_small_edits_do_not_leave_many_segments[full",
    "test_edit_places.py::test_an_agent_can_replace_its_pinned_tool_result_for_ever[sliding-200",
    "models/test_source.py::test_killed_conversion_leaves_no_visible_model[packed.safetensors]",
    "models/test_source.py::test_killed_conversion_leaves_no_visible_model[kvkeep.json]",
    "shared/test_protocol.py::test_no_schedule_loses_or_repeats_a_confirmed_commit[a writer that r",
    "test_edit_costs.py::test_long_segments_that_were_cut_say_what_the_naive_memory_says[full",
    "test_edit_costs.py::test_long_segments_that_were_cut_say_what_the_naive_memory_says[shift",
    "cli/test_own_model.py::test_commands_pull_a_gguf_file_from_the_hub",
    "cli/test_own_model.py::test_interrupted_pull_leaves_no_model",
    "cli/test_archive.py::test_two_runs_equal_one_long_run[fitted",
    "cli/test_archive.py::test_two_runs_equal_one_long_run[snapkv",
    "cli/test_chat.py::test_a_turn_costs_no_more_bookkeeping_in_a_long_chat",
    "cli/test_early_prompt.py::test_a_chat_can_be_left_while_it_is_loaded[Ctrl-C",
    "cli/test_early_prompt.py::test_a_chat_can_be_left_while_it_is_loaded[SIGTERM",
    "cli/test_early_prompt.py::test_an_error_of_loading_ends_the_chat",
    "cli/test_early_prompt.py::test_what_is_typed_stays_when_the_chat_is_loaded",
    "cli/test_recall.py::test_a_task_may_be_hidden_in_either_text[common",
    "cli/test_store.py::test_sessions_are_copied_checked_and_removed_in_a_store[s3",
    "models/test_families.py::test_bfloat16_streams_are_as_close_to_float32_as_transformers[gemma3n",
    "models/test_families.py::test_converted_model_equals_transformers_on_the_same_weights",
    "server/test_chat.py::test_the_async_client_sends_concurrent_requests",
    "store/test_damage.py::test_a_flipped_bit_of_the_payload_is_refused[zstd",
    "test_edit_costs.py::test_many_edits_copy_fewer_cells_than_are_held_times_edits[delete",
    "integrations/test_architectures.py::test_bounded_logits_equal_streaming_with_the_models_own_attention[20-0-glm",
    "integrations/test_architectures.py::test_bounded_logits_equal_streaming_with_the_models_own_attention[20-0-gemma2",
    "models/test_config_defaults.py::test_missing_field_takes_the_default_of_transformers[Gemma3nForConditionalGeneration",
    "models/test_config_defaults.py::test_missing_field_takes_the_default_of_transformers[Gemma4ForConditionalGeneration-4",
    "models/test_config_defaults.py::test_missing_field_takes_the_default_of_transformers[Qwen",
    "test_kvzip.py::test_a_fact_across_two_chunks_is_recalled",
    "test_pins.py::test_pinned_tokens_stay_while_many_windows_are_fed[512",
    "test_repeats.py::test_a_fact_among_repeats_is_kept_whole_in_every_head",
    "test_sampling.py::test_filters_pass_the_likeliest_in_proportion[how5",
    "test_self_extend.py::test_logits_equal_the_longlm_reference[1-4",
    "test_self_extend.py::test_logits_equal_the_longlm_reference[1-8",
    "test_storage_bytes.py::test_storage_is_at_most_nine_eighths_of_the_budget[archive-8",
    "test_turn_spans.py::test_memory_is_what_the_template_renders[llama3, ",
    "test_turn_spans.py::test_memory_is_what_the_template_renders[mistral",
    "compiled/test_real_model.py::test_four_bit_weights_have_the_perplexity_of_their_unpacked_values",
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
    "test_usable_threads.py::test_torch_is_limited_to_the_quota_unless_a_number_was_chosen[max",
    "test_usable_threads.py::test_torch_is_limited_to_the_quota_unless_a_number_was_chosen[150000-environment2",
    "test_usable_threads.py::test_torch_is_limited_to_the_quota_unless_a_number_was_chosen[150000-environment3",
    "chat/test_output_reader.py::test_the_time_to_read_is_linear_in_the_length",
    "cli/test_batch.py::test_a_killed_batch_resumes_without_lost_or_repeated_answers",
    "compiled/test_operands.py::test_a_session_that_runs_out_of_memory_is_unchanged_and_continues",
    "engine/test_engine.py::test_a_prefix_store_hit_changes_no_bit",
    "engine/test_engine.py::test_prefix_reuse_changes_no_bit",
    "engine/test_steps.py::test_reuse_up_to_a_message_by_the_default_model_equals_evaluating_all",
    "models/test_gguf_families.py::test_logits_equal_the_original_model",
    "server/test_alignment.py::test_a_servers_default_holds_for_each_owner_alone",
    "server/test_alignment.py::test_answers_say_how_their_prompt_was_aligned",
    "server/test_alignment.py::test_stored_responses_and_slots_are_aligned_if_that_is_asked_for",
    "server/test_limits.py::test_long_lists_and_texts_have_a_limit",
    "server/test_malformed.py::test_values_of_wrong_types_are_refused",
    "server/test_overflow.py::test_the_end_of_a_stream_says_how_much_was_forgotten",
    "server/test_prompt_rules.py::test_tools_that_come_later_leave_the_prompt_before_them_as_it_was",
    "store/test_prefix_checkpoints.py",
    "test_alignment.py::test_small_changes_leave_most_predictions_of_a_real_model",
    "test_edits.py::test_a_session_with_several_residual_streams_equals_the_naive_memory",
    "test_edits.py::test_what_a_fork_does_the_other_does_not_see",
    # Four to ten seconds for a case, whose code other tests of the first tier run too.
    "cli/test_data_folder.py::test_a_server_keeps_its_sessions_in_the_data_folder",
    "cli/test_early_prompt.py::test_a_message_that_was_sent_early_is_answered",
    "cli/test_recall.py::test_a_report_names_the_calibration",
    "cli/test_recall.py::test_a_task_may_be_hidden_in_either_text[variables",
    "evaluate/test_haystack.py::test_docstrings_are_deterministic_and_import_no_module",
    "models/test_chat_templates.py::test_a_template_may_look_through_all_messages_for_each",
    "models/test_control.py::test_threads_share_the_tokenizer_with_secret_names",
    "models/test_families.py::test_loading_imports_no_compiler_of_torch[gemma3",
    "models/test_source.py::test_killed_conversion_leaves_no_visible_model[the folder",
    "policies/test_archive_calls.py::test_a_step_that_fails_inside_the_model_changes_nothing",
    "server/test_transport.py::test_a_request_waits_for_its_own_generations_however_long",
    "store/test_exactness.py::test_different_instruction_sets_are_reported",
    "store/test_restored_memory.py::test_a_tensor_that_is_kept_keeps_no_other_of_its_file_in_memory",
    "store/test_restored_memory.py::test_a_restored_session_takes_its_cells_once",
    "store/test_saved_checkpoints.py::test_a_restored_session_does_what_the_saved_one_does_to_the",
    "test_compaction.py::test_memory_stays_bounded_over_ten_compactions_and_a_fork_before_is_intact",
    "test_message_alignment.py::test_an_interrupted_alignment_is_done_or_undone",
    "test_reconstruction.py::test_scores_of_the_default_model_are_close_to_float32[attention",
    "test_speculation.py::test_speculation_changes_no_bit_of_sessions_and_groups[20",
    "test_speculation.py::test_speculation_changes_no_bit_of_sessions_and_groups[30",
    "test_stored_calibration.py::test_a_server_loads_its_calibrated_sessions_again",
)

# Patterns of fnmatch, without brackets, which it has a meaning for.
FIRST = (
    "bench/test_soak4m.py::test_a_killed_run_goes_on_as_one_that_was_not",
    "cli/test_doctor.py::test_a_model_names_its_executors",
    "cli/test_grid.py::test_a_method_is_measured_under_both_budgets",
    "cli/test_remote.py::test_every_branch_of_a_named_chat_is_saved",
    "cli/test_terminal.py::test_an_answer_is_rendered_as_markdown_in_any_pieces?7-6?",
    "cli/test_terminal.py::test_plain_answers_are_wrapped_at_words?1000?",
    "chat/test_renderer.py::test_any_conversation_is_rendered_without_control*?gpt-oss?",
    "compiled/test_decoding.py::test_logits_are_as_near_to_float32*-qwen3-128-*",
    "compiled/test_experts.py::test_experts_are_packed_and_routers_are_not?gpt-oss-int4*",
    "compiled/test_experts.py::test_experts_are_packed_and_routers_are_not?qwen2-moe-None*",
    "compiled/test_families.py::*?gated-sigmoid-32?",
    "compiled/test_families.py::*?gated-sigmoid-32-4-*",
    "compiled/test_families.py::*?lfm2-moe-64-4-*",
    "compiled/test_ragged.py::test_logits_are_as_near_to_float32*-qwen3-128-*",
    "engine/test_checkpoint_reuse.py::*?delta_net?",
    "engine/test_checkpoint_reuse.py::*?local?",
    "engine/test_checkpoint_reuse.py::test_sessions_from_snapshots_have_the_engine_s_limit",
    "engine/test_reuse.py::test_random_generations*?disk-*",
    "engine/test_steps.py::test_reuse_up_to_a_message_by_the_default_model*?counts0?",
    "models/test_gguf_families.py::test_logits_equal_the_original_model?bamba?",
    "models/test_gguf_families.py::test_logits_equal_the_original_model?gemma4-experts?",
    "models/test_gguf_families.py::test_logits_equal_the_original_model?phi4-mini?",
    "server/test_alignment.py::test_answers_say_how_their_prompt_was_aligned?/v1/chat/completions?",
    "server/test_overflow.py::test_the_end_of_a_stream_says_how_much*?/v1/chat/completions?",
    "server/test_pins.py::test_a_mark_is_found_wherever_it_is?message?",
    "store/test_prefix_checkpoints.py::*?delta_net?",
    "fleet/test_shared_sessions.py::test_a_request_with_a_key_runs_once_at_any_server?folder?",
    "fleet/test_shared_sessions.py::test_a_session_continues_at_another_server_to_the_bit?folder?",
    "fleet/test_shared_sessions.py::test_edits_forks_and_spans_are_visible*?folder?",
    "fleet/test_shared_sessions.py::test_if_match_is_checked_at_every_server?folder?",
    "integrations/test_transformers_cache.py::test_padding_never_becomes_tokens",
    "integrations/test_transformers_cache.py::test_recurrent_states_are_saved_and_forked_but*",
    "integrations/test_transformers_cache.py::test_unsupported_*",
    "models/test_families.py::test_bounded_logits_equal_the_naive_reference?gemma2?",
    "models/test_families.py::test_bounded_logits_equal_the_naive_reference?granite-moe?",
    "models/test_families.py::test_bounded_logits_equal_the_naive_reference?lfm2?",
    "models/test_families.py::test_bounded_logits_equal_the_naive_reference?qwen3.5?",
    "models/test_families.py::test_logits_equal_transformers?cohere2?",
    "models/test_families.py::test_logits_equal_transformers?gemma3?",
    "models/test_families.py::test_logits_equal_transformers?gemma4-as-published?",
    "models/test_families.py::test_logits_equal_transformers?glm4-quarter?",
    "models/test_families.py::test_logits_equal_transformers?gpt-oss?",
    "models/test_families.py::test_logits_equal_transformers?granite4-h?",
    "models/test_families.py::test_logits_equal_transformers?lfm2?",
    "models/test_families.py::test_logits_equal_transformers?llama?",
    "models/test_families.py::test_logits_equal_transformers?mixtral?",
    "models/test_families.py::test_logits_equal_transformers?olmo2?",
    "models/test_families.py::test_logits_equal_transformers?phi3?",
    "models/test_families.py::test_logits_equal_transformers?qwen2?",
    "models/test_families.py::test_logits_equal_transformers?qwen3?",
    "models/test_families.py::test_logits_equal_transformers?qwen3.5?",
    "models/test_families.py::test_logits_equal_transformers?qwen3-moe?",
    "models/test_families.py::test_logits_equal_transformers?smollm3?",
    "models/test_gguf_families.py::test_fused_matrices*?granite4-h-2?",
    "models/test_gguf_families.py::test_fused_matrices*?phi3-2?",
    "models/test_gguf_families.py::test_fused_matrices*?qwen3.5-2?",
    "models/test_gguf_families.py::test_fused_matrices*?gemma4-2?",
    "models/test_gguf_families.py::test_fused_matrices*?lfm2-2?",
    "models/test_text_part.py::test_logits_equal_transformers?Gemma3-*",
    "models/test_text_part.py::test_logits_equal_transformers?Qwen3_5-*",
    "server/test_response_compaction.py::test_a_response_compacts_its_conversation*",
    "server/test_schemas_and_tools.py::*?chat-hermes?",
    "server/test_turns.py::test_turns_equal_a_conversation_in_python",
    "server/test_written_answers.py::test_each_turn_resumes*?openai_chat-whole?",
    "server/test_chat_answers.py::test_every_form_of_answers_is_read?llama3?",
    "policies/test_archive_attention.py::test_each_token_sees_the_kept*",
    "server/test_schemas_and_tools.py::*?hermes-chat?",
    "shared/test_prefixes.py::*?folder?",
    "shared/test_sessions.py::*?folder?",
    "test_state_layers.py::test_forks_and_snapshots_continue_to_the_bit*-full-*",
)

# Files that start a cluster for all of their tests. pytest-xdist gives the first tests to one
# worker, and lets idle workers take the last ones: they would start clusters of their own.
BEFORE_OTHERS = ("fleet/test_ray.py",)

# Files whose cases are files of the repository, its commands, or formats: CI runs all of them.
UNSAMPLED = (
    "cli/test_help.py",
    "fuzz/",
    "models/test_template_files.py",
    "page/test_javascript.py",
    "server/test_openapi.py",
    "test_argument_types.py",
    "test_docs.py",
    "test_install.py",
    "test_privacy.py",
    "test_reference_pages.py",
    "test_release.py",
    "test_structure.py",
    "test_typing.py",
)

FIRST_TIER, SECOND_TIER = "not slow and not extended", "extended and not slow"


def has_tests_of(expression: str, file: str, source: str) -> bool:
    """Whether a file may have tests that a mark expression selects; True unless it is certain.

    Each worker of pytest-xdist collects all tests. Importing a third of the files costs it as much
    as a minute of tests. file: "folder/file.py". source: its text.
    """
    if expression == FIRST_TIER:
        whole = any(file.startswith(entry) for entry in EXTENDED if "::" not in entry)
        return not whole or any(fnmatchcase(file, name.partition("::")[0]) for name in FIRST)
    if expression == SECOND_TIER:
        listed = any(file.startswith(entry.partition("::")[0]) for entry in EXTENDED)
        return listed or "mark.extended" in source or file.startswith("compiled/")
    return True


def is_extended(test: str) -> bool:
    """Whether a test, as "folder/file.py::name[case]", is left out of the first tier."""
    return test.startswith(EXTENDED) and not _matches(test, FIRST)


def is_slow(test: str) -> bool:
    """Whether a test, as "folder/file.py::name[case]", runs before releases only."""
    return _matches(test, BEFORE_RELEASES) and not _matches(test, (*FIRST, *IN_CI))


def beyond_samples(tests: Iterable[str]) -> set[str]:
    """Return the cases that run before releases only, of tests with many cases.

    Of n cases CI runs the square root of n, chosen by a digest of their names: both of 2, 2 of 4,
    10 of 100. `FIRST` and `IN_CI` name further ones; of files in `UNSAMPLED` it runs all.
    """
    cases = defaultdict(list)
    for test in tests:
        if not test.startswith(UNSAMPLED):
            cases[test.partition("[")[0]].append(test)
    beyond = set[str]()
    for each in cases.values():
        others = [test for test in each if not is_slow(test)]
        beyond.update(sorted(others, key=_digest)[ceil(len(others) ** 0.5) :])
    return {test for test in beyond if not _matches(test, (*FIRST, *IN_CI))}


def _digest(test: str) -> bytes:
    return sha256(test.encode()).digest()


def _matches(test: str, patterns: tuple[str, ...]) -> bool:
    return _expression(patterns).match(test) is not None


@cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return one expression for all patterns: a test is compared with hundreds of them."""
    return re.compile("|".join(map(translate, patterns)))
