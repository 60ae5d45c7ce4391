"""What cost agents calls, misled them or was missing, row by row, with the tests that replay it.

The rows are those of a survey of ten tasks that were tried with the tools alone. A row is added
here together with the tests that hold it; a test that is renamed or taken away leaves its row.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROWS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "forgetting is told before the run, with the call that keeps skills, and can be read",
        (
            "engine/dry_run/test_dry_run.py::"
            "test_sft_is_told_what_is_at_stake_with_the_call_that_keeps_it",
            "engine/runs/reading/test_rollouts.py::"
            "test_the_questions_and_answers_on_kept_skills_are_read_like_any_others",
            "engine/evidence/verdict/test_regression.py::"
            "test_what_keep_replayed_stands_beside_what_was_kept",
        ),
    ),
    2: (
        "a wait is long where progress keeps it alive, says what changed, and a plan waits as one",
        (
            "mcp_server/protocol/test_tools_wait.py::"
            "test_a_wait_is_longer_than_fifty_seconds_only_for_a_client_that_takes_progress",
            "mcp_server/protocol/test_tools_wait.py::"
            "test_a_caller_with_a_cursor_is_told_what_has_changed_and_what_to_call_next_for_as_long",
            "engine/runs/test_run_status.py::test_an_evaluation_under_way_says_how_much_is_answered",
            "engine/runs/submit/test_plans.py::"
            "test_the_end_of_a_plan_says_what_the_verdicts_warn_of_and_shows_every_alert",
            "e2e/test_plan.py::"
            "test_a_chain_of_sft_grpo_and_an_evaluation_answers_with_a_verdict_for_each_step",
        ),
    ),
    3: (
        "an exam without training rows is a kind of its own",
        (
            "engine/environments/test_push.py::"
            "test_after_an_exam_comes_an_evaluation_and_not_a_dry_run",
            "engine/worker/test_evaluate.py::"
            "test_an_exam_without_training_rows_is_pushed_and_evaluated",
        ),
    ),
    4: (
        "estimates hold their band",
        ("engine/cost/test_estimate.py::test_eight_of_ten_later_runs_fall_into_the_band",),
    ),
    5: (
        "one limit of read_rollouts, a word where a page comes short, no cut that saves nothing",
        (
            "engine/runs/reading/test_rollouts.py::"
            "test_the_hint_of_a_wrong_limit_is_the_nearest_that_is_allowed",
            "engine/runs/reading/test_rollouts.py::test_a_page_that_comes_short_says_what_cut_it",
            "engine/runs/reading/test_rollouts.py::"
            "test_a_turn_of_a_few_letters_is_whole_at_the_least_max_chars",
            "mcp_server/protocol/test_tools.py::test_the_limits_of_read_rollouts_are_the_engines",
        ),
    ),
    6: (
        "an evaluation of several models shows the answers of all; a filter chooses one",
        (
            "engine/runs/reading/test_rollouts.py::"
            "test_an_evaluation_of_several_models_shows_the_answers_of_all",
            "engine/runs/reading/test_rollouts.py::test_a_filter_by_model_chooses_the_answers_of_one",
        ),
    ),
    7: (
        "the cause that did the harm comes first",
        (
            "e2e/test_planted_troubles.py::test_a_planted_trouble_is_named_first_with_its_cure",
            "engine/evidence/detect/test_diagnose.py::"
            "test_an_alert_that_is_not_over_is_a_finding_unless_the_run_ended_no_worse",
        ),
    ),
    8: (
        "a run that cannot succeed is refused with the number that would do",
        (
            "engine/dry_run/test_dry_run.py::"
            "test_reference_answers_that_max_tokens_cuts_fail_with_the_number_that_would_do",
        ),
    ),
    9: (
        "where success ties the reward decides, and both are told",
        (
            "engine/worker/evaluation/test_during_training.py::"
            "test_where_success_ties_the_higher_reward_is_the_best_and_ends_no_patience",
            "engine/evidence/verdict/test_side_notes.py::"
            "test_where_success_ties_the_reward_and_the_cut_answers_are_told",
            "engine/evidence/compare/test_compare.py::"
            "test_where_success_ties_the_reward_and_the_cut_answers_stand_in_the_result",
        ),
    ),
    10: (
        "the audit's word travels with the numbers of its environment",
        (
            "engine/evidence/verdict/test_side_notes.py::"
            "test_a_failed_audit_is_named_with_what_it_pays",
            "engine/evidence/compare/test_compare.py::"
            "test_the_word_of_a_failed_audit_travels_with_a_comparison",
            "engine/runs/test_run_status.py::"
            "test_the_word_of_a_failed_audit_stands_beside_the_scores_of_an_evaluation",
            "engine/evidence/test_reported.py::"
            "test_the_word_of_a_failed_audit_travels_with_the_number_and_the_best_run",
        ),
    ),
    11: (
        "a task may have tools of its own, and rows that share one tool text are a warning",
        (
            "envs/test_tool_schemas.py::test_a_tasks_own_tools_come_before_those_of_its_environment",
            "engine/dry_run/test_dry_run_wording.py::"
            "test_rows_that_share_one_tool_text_are_a_warning_with_the_setting_that_varies_it",
            "engine/worker/test_evaluate.py::test_an_evaluation_asks_the_same_tasks_in_other_words",
        ),
    ),
    12: (
        "leaks are listed by file and line, and can be dropped",
        (
            "engine/environments/test_task_rows.py::test_leaking_rows_are_listed_by_file_and_line",
            "engine/environments/test_task_rows.py::"
            "test_drop_leaks_leaves_out_the_copies_and_asks_each_question_once",
        ),
    ),
    13: (
        "a split to choose by, and families on one side",
        (
            "engine/runs/evaluation/test_exam.py::"
            "test_dev_tasks_choose_and_every_held_out_task_is_reported",
            "engine/environments/test_task_rows.py::test_rows_of_one_group_are_stored_on_one_side",
            "engine/evidence/overlap/test_families.py::"
            "test_prompts_of_the_same_words_in_another_order_are_named_with_the_group_to_give",
            "engine/evidence/overlap/test_families.py::test_one_noun_in_many_templates_is_named",
        ),
    ),
    14: (
        "results by metadata with intervals, and the smallest gap explained",
        (
            "engine/evidence/compare/test_by_metadata.py::"
            "test_one_model_is_shown_by_operation_with_intervals",
            "engine/evidence/compare/test_named_metric.py::"
            "test_a_change_far_above_the_smallest_detectable_gap_says_what_that_gap_is",
        ),
    ),
    15: (
        "the line that matters comes first, nothing is said twice, the rest on request",
        (
            "engine/dry_run/test_dry_run.py::"
            "test_a_short_reply_leaves_out_what_passed_and_says_how_to_see_it",
            "engine/dry_run/test_dry_run.py::"
            "test_a_reply_of_many_probes_stays_short_with_each_setting_once",
            "engine/runs/test_run_status.py::test_what_was_forgotten_is_said_once",
        ),
    ),
    16: (
        "a run from a run that is not done waits for it",
        (
            "engine/machine/processes/test_waiting.py::"
            "test_grpo_from_a_running_sft_waits_for_it_and_then_starts_from_its_best",
        ),
    ),
    17: (
        "runs differ in what the user changed, length counted once",
        (
            "engine/runs/test_diff.py::"
            "test_two_runs_differ_in_what_was_chosen_and_in_what_follows_from_it",
            "engine/runs/test_diff.py::test_how_long_to_train_is_one_change_however_it_was_said",
        ),
    ),
    18: (
        "a run with nothing left to learn says so, and ends where asked",
        (
            "engine/evidence/detect/test_detectors.py::"
            "test_an_alert_comes_while_there_is_time_to_stop",
            "engine/worker/test_training_alerts.py::"
            "test_stop_early_alert_ends_the_run_with_a_checkpoint_and_its_verdict",
        ),
    ),
    19: (
        "the shapes of tool calls stand in an example that runs; chat takes tools",
        (
            "playbook/test_playbook.py::test_the_example_environments_run_and_pay_their_own_gold",
            "engine/serving/test_chat.py::test_a_tool_call_is_answered_by_the_next_call",
            "mcp_server/protocol/test_tools_chat.py::"
            "test_a_conversation_with_tools_goes_on_over_the_protocol",
        ),
    ),
    20: (
        "no evaluation skipped, no rows of nulls, no alert lost, a deployment stopped as a whole",
        (
            "engine/runs/test_lifecycle.py::"
            "test_what_was_reached_before_the_first_wait_is_not_skipped",
            "engine/runs/test_lifecycle.py::"
            "test_the_last_wait_still_shows_the_alerts_that_an_earlier_one_brought",
            "engine/runs/reading/test_logs.py::"
            "test_steps_at_which_nothing_asked_for_was_measured_are_no_rows_of_nulls",
            "engine/serving/test_service.py::test_the_process_ends_with_the_last_model_asked_for",
        ),
    ),
    21: (
        "SFT's defaults reach",
        (
            "engine/settings/test_defaults.py::"
            "test_sft_makes_enough_updates_whatever_the_number_of_rows",
        ),
    ),
    22: (
        "alerts of a run are findings of its diagnosis",
        (
            "engine/evidence/detect/test_diagnose.py::"
            "test_an_alert_that_is_not_over_is_a_finding_unless_the_run_ended_no_worse",
        ),
    ),
    23: (
        "one number to report, the same wherever it is asked for",
        (
            "engine/evidence/test_reported.py::"
            "test_a_run_has_one_number_wherever_it_is_asked_for_and_however_it_is_spelt",
            "engine/evidence/test_reported.py::"
            "test_the_curve_is_said_to_have_chosen_the_checkpoint",
            "engine/worker/test_evaluate.py::test_tasks_that_choose_no_checkpoint_are_asked_first",
        ),
    ),
    24: (
        "what an exam can show is told before the run",
        ("engine/dry_run/test_dry_run_exam.py::test_the_exam_is_in_the_report",),
    ),
    25: (
        "one cap over several runs, hours that count while a run goes on",
        (
            "engine/runs/submit/test_plans.py::test_the_cap_is_that_of_the_whole",
            "engine/runs/test_run_status.py::test_the_hours_of_a_run_count_while_it_goes_on",
        ),
    ),
    26: (
        "a metric that a task has not is absent there; a metric has a verdict",
        (
            "engine/evidence/compare/test_named_metric.py::"
            "test_an_answer_without_the_metric_is_absent_and_not_0",
            "engine/evidence/compare/test_named_metric.py::test_a_metric_has_a_verdict_of_its_own",
        ),
    ),
    27: (
        "lost of what was right, by group and with its interval, under a gain too",
        (
            "engine/evidence/verdict/test_regression.py::"
            "test_a_sample_of_an_environment_says_of_how_many_tasks_it_is",
            "engine/evidence/verdict/test_regression.py::"
            "test_a_run_that_lost_old_skills_is_said_to_have_forgotten_them",
            "engine/evidence/verdict/test_verdict.py::"
            "test_a_gain_does_not_hide_what_was_right_before_and_is_lost",
        ),
    ),
    28: (
        "cards of base models, read as a resource and by a tool",
        (
            "engine/evidence/cards/test_base_card.py::"
            "test_the_card_of_pebble_names_each_skill_with_its_share_and_its_words",
            "engine/evidence/cards/test_base_card.py::"
            "test_a_model_without_a_card_shows_what_trainings_from_it_asked",
            "mcp_server/api/test_addresses.py::"
            "test_a_client_with_tools_alone_reads_what_is_a_resource",
            "mcp_server/api/test_addresses.py::"
            "test_the_list_of_models_leads_to_the_card_of_a_base_model",
        ),
    ),
    29: (
        "an error is never rounded away",
        (
            "engine/core/test_format.py::test_a_share_in_percent_never_rounds_an_error_away",
            "engine/core/test_format.py::test_no_sentence_for_people_rounds_a_share_by_itself",
        ),
    ),
    30: (
        "a slow model answers in parts, and a slow start is taken up by the next call",
        (
            "engine/serving/test_chat.py::"
            "test_a_slow_answer_is_given_in_parts_that_are_token_for_token_the_whole",
            "engine/serving/test_chat.py::"
            "test_a_model_that_gives_no_token_fails_and_one_that_is_busy_does_not",
            "engine/serving/test_service.py::"
            "test_a_slow_start_is_told_and_taken_up_by_the_next_call",
        ),
    ),
    31: (
        "a plateau is named with the answers on it",
        (
            "engine/evidence/detect/test_diagnose.py::"
            "test_a_plateau_is_shown_by_the_answers_on_it_and_by_no_other",
        ),
    ),
}


@cache
def names_in(file: str) -> frozenset[str]:
    """The names of the tests that a file below tests/ defines; none where there is no such file."""
    path = ROOT / "tests" / file
    if not path.is_file():
        return frozenset()
    nodes = ast.parse(path.read_text("utf-8")).body
    functions = (n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(n.name for n in functions if n.name.startswith("test_"))


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_held_by_tests_that_exist(row: int):
    what, held_by = ROWS[row]
    missing = [test for test in held_by if test.partition("::")[2] not in _named_beside(test)]
    assert 1 <= row <= 31 and what and held_by and not missing


def _named_beside(test: str) -> frozenset[str]:
    return names_in(test.partition("::")[0])
