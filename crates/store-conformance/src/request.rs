//! The cases of request, for engines that implement [`HasRequests`](crate::HasRequests).

pub mod callback;
pub mod cancel;
pub mod claim;
pub mod concurrent;
pub mod dead;
pub mod erase;
pub mod fixtures;
pub mod history;
pub mod lease;
pub mod limits;
pub mod maintenance;
pub mod model;
pub mod reads;
pub mod report;
pub mod restart;
pub mod sealing;
pub mod submit;
pub mod turns;
pub mod wait;
pub mod webhooks;

/// Generates one test for each case of request. The fixture is a path from `crate`.
#[macro_export]
macro_rules! request_suite {
    ($fixture:ty) => {
        $crate::suite_tests! { $fixture, request;
            submit: [
                a_new_engine_is_empty_and_its_clock_shows_the_start,
                a_new_submission_is_accepted_and_read_back_as_it_was_sent,
                the_same_submission_is_replayed_with_its_current_status,
                another_payload_under_a_used_key_is_a_conflict_and_changes_nothing,
                fingerprints_are_compared_to_their_last_bit,
                tenants_may_use_the_same_keys,
                a_key_is_free_again_after_a_day_to_the_microsecond,
                a_submission_twice_in_a_batch_is_accepted_once,
                a_mixed_batch_is_answered_in_its_order,
                an_empty_batch_has_no_outcomes,
                a_large_batch_is_accepted_whole,
                awkward_keys_tenants_and_types_stay_distinct_and_unchanged,
                payloads_are_bytes_of_any_value_and_length,
                a_request_for_the_broker_is_pending_enqueue,
            ],
            limits: [
                exactly_the_limit_is_accepted,
                counts_carry_over_from_batch_to_batch,
                a_full_window_says_how_long_to_wait_and_ends_on_time,
                replays_and_conflicts_do_not_count,
                each_tenant_has_its_own_window,
                without_limits_nothing_is_limited_nor_counted,
                changed_limits_apply_from_the_next_batch,
                a_receipt_says_what_is_left_of_the_limits,
                tenants_of_one_batch_may_have_different_limits,
                limits_of_tenants_are_stored_until_they_are_removed,
            ],
            reads: [
                an_unknown_request_is_none,
                requests_are_listed_the_newest_first,
                a_listed_request_equals_the_found_one,
                summaries_by_id_leave_out_payload_and_result,
                lists_are_read_page_by_page,
                lists_can_be_filtered_by_status,
                a_list_of_a_rare_status_is_bounded_and_says_where_to_continue,
                tenants_see_their_own_requests_only,
                a_list_of_every_tenant_can_be_filtered_by_type,
                unfinished_requests_come_with_their_jobs_the_longest_due_first,
            ],
            claim: [
                a_job_is_the_request_as_it_was_sent,
                a_claim_returns_no_more_bytes_than_the_maximum,
                jobs_come_in_the_order_in_which_they_became_due,
                a_deferred_job_comes_before_jobs_due_later,
                each_downstream_has_its_own_capacity,
                without_capacity_nothing_is_claimed_or_leased,
                an_empty_claim_says_how_long_to_wait,
                requests_missing_from_the_broker_can_be_claimed,
                downstreams_are_listed_once_while_jobs_wait_for_them,
                jobs_are_counted_by_downstream_and_state,
                awkward_names_of_downstreams_stay_distinct,
                named_requests_are_claimed_and_no_others,
                a_named_request_that_cannot_be_claimed_is_left_out,
                every_job_of_a_large_claim_can_be_reported,
            ],
            turns: [
                a_tenant_with_many_jobs_leaves_the_others_their_turns,
                every_one_of_many_tenants_has_its_turn,
                turns_are_as_long_as_the_weights_say,
                a_tenant_has_no_more_calls_than_it_may_have,
                a_named_job_of_a_tenant_without_capacity_is_left,
                a_job_that_was_put_off_has_its_turn_when_it_is_due,
                what_is_cancelled_or_erased_has_no_turn_and_a_replay_has_one,
                jobs_of_tenants_with_few_are_express,
                express_jobs_are_claimed_by_turns_too,
                parked_jobs_do_not_count_against_express_jobs,
                waiters_are_woken_by_express_jobs_alone,
            ],
            lease: [
                a_lease_lasts_to_its_last_microsecond,
                a_claim_by_name_succeeds_exactly_when_the_lease_ends,
                a_job_claimed_again_has_a_higher_token_and_counts_an_attempt,
                a_worker_that_lost_its_lease_changes_nothing,
                a_report_after_the_lease_counts_while_nobody_else_has_claimed,
                a_request_that_kills_its_workers_becomes_a_dead_letter,
                a_claim_by_name_exhausts_requests_with_no_attempt_left,
                a_worker_of_an_exhausted_request_is_refused,
                a_missing_callback_counts_as_an_attempt_until_none_is_left,
                the_policy_of_the_claim_sets_the_lease,
                a_clock_set_back_delays_no_request,
            ],
            report: [
                a_completed_request_has_its_result_and_no_job,
                a_completed_request_may_have_no_result,
                a_rejected_request_says_why_and_is_no_dead_letter,
                a_retry_waits_as_long_as_its_random_number_decides,
                a_retry_waits_as_long_as_the_downstream_asks_within_bounds,
                the_last_failed_retry_creates_a_dead_letter,
                a_failed_attempt_is_shown_until_one_succeeds,
                a_request_that_awaits_its_callback_cannot_be_claimed,
                a_call_that_was_not_made_counts_no_attempt,
                a_final_request_refuses_reports,
                a_request_that_was_not_claimed_refuses_reports,
                a_mixed_batch_of_reports_is_answered_in_its_order,
                an_empty_batch_of_reports_has_no_outcomes,
                awkward_details_are_stored,
            ],
            webhooks: [
                every_final_request_enqueues_its_webhook_once,
                without_a_callback_url_no_webhook_is_enqueued,
                no_webhook_is_enqueued_before_the_final_status,
                refused_reports_enqueue_no_webhook,
                a_replayed_request_that_ends_again_enqueues_another_webhook,
                every_final_request_wakes_a_waiter_of_the_webhook_topic,
            ],
            callback: [
                a_callback_ends_the_wait,
                a_callback_may_say_that_it_failed_and_why,
                a_callback_may_come_before_the_workers_report,
                a_callback_may_come_between_attempts,
                a_repeated_callback_is_refused_and_changes_nothing,
                a_callback_for_an_unknown_request_is_not_an_error,
                a_callback_before_the_first_attempt_is_refused,
                a_callback_for_a_dead_letter_is_refused_until_it_is_called_again,
                results_and_failures_of_callbacks_are_stored_unchanged,
            ],
            cancel: [
                a_cancelled_request_is_final_and_never_claimed,
                what_comes_of_the_call_of_a_cancelled_request_is_thrown_away,
                a_request_that_has_ended_cannot_be_cancelled,
                a_replayed_letter_can_be_cancelled,
                a_cancelled_request_keeps_its_key_and_is_listed_and_purged,
            ],
            erase: [
                an_erasure_leaves_nothing_of_a_tenant_and_all_of_the_others,
                a_worker_that_is_calling_an_erased_request_loses_it,
                what_is_submitted_after_an_erasure_began_stays,
                an_erasure_says_at_its_end_how_many_requests_it_erased,
                an_erasure_can_be_passed_over,
                dead_webhooks_of_erased_requests_are_discarded,
            ],
            dead: [
                a_dead_letter_is_the_request_and_when_it_died,
                a_payload_that_is_too_long_for_a_list_is_left_out,
                dead_letters_are_read_page_by_page,
                a_replayed_letter_starts_again_with_all_its_attempts,
                a_worker_from_before_a_replay_stays_fenced_off,
                only_dead_letters_are_replayed_or_discarded,
                a_letter_is_replayed_once,
                several_letters_are_replayed_in_one_call,
                a_discarded_letter_is_off_the_list_and_stays_failed,
            ],
            maintenance: [
                stranded_requests_are_listed_by_age,
                requests_that_the_broker_has_are_accepted,
                marking_a_started_job_as_enqueued_changes_nothing,
                no_rollout_is_stored_until_somebody_changes_it,
                a_rollout_change_leaves_other_switches_alone,
                old_requests_are_purged_when_they_are_final,
                a_purge_deletes_no_more_than_its_limit,
                expired_keys_are_purged_on_time_and_their_requests_stay,
                a_key_that_outlives_its_request_is_free,
                a_replayed_letter_is_not_purged_however_old,
                the_books_are_right_after_every_step,
            ],
            sealing: [
                keys_are_registered_and_removed_by_name_and_digest,
                requests_sealed_with_a_key_are_found_page_by_page,
                a_result_sealed_with_a_key_is_found_too,
                hashing_begins_once_and_keeps_its_last_key,
                a_key_that_was_prepared_is_the_one_hashing_begins_with,
                servers_that_begin_hashing_at_once_agree_on_its_key,
                a_key_from_before_hashing_is_found_under_its_hash,
                names_of_keys_are_listed_page_by_page,
                a_field_that_changed_meanwhile_is_not_sealed_again,
                the_newest_request_is_the_one_accepted_last,
            ],
            wait: [
                wait_returns_when_something_was_accepted_before,
                wait_returns_when_something_is_accepted_while_waiting,
                wait_returns_when_a_letter_is_replayed,
                wait_returns_after_its_timeout,
            ],
            concurrent: [
                a_hundred_identical_submissions_create_one_request,
                a_hundred_identical_submissions_to_two_servers_create_one_request,
                an_expired_key_is_reused_once,
                different_payloads_under_one_key_leave_one_request,
                batches_naming_keys_in_any_order_all_succeed,
                a_tenants_limit_holds_for_all_servers_together,
                parallel_workers_share_no_job_and_complete_each_once,
                parallel_claims_by_name_have_one_winner,
                a_worker_and_a_callback_end_a_request_once,
                a_request_is_cancelled_or_ends_otherwise_but_never_both,
                a_cancellation_and_a_claim_leave_no_job,
                an_erasure_beside_everything_else_leaves_nothing_and_keeps_the_books,
                a_dead_letter_is_replayed_or_discarded_once,
                a_job_claimed_while_the_broker_takes_it_stays_claimed,
                everything_at_once_keeps_the_books,
            ],
            restart: [
                everything_is_unchanged_after_a_restart,
                keys_and_windows_survive,
                leases_survive_and_their_holders_can_report,
                retry_delays_and_callback_deadlines_survive,
                tokens_grow_over_restarts_and_replays,
                webhooks_survive,
            ],
            history: [
                random_histories_match_the_model,
            ],
        }
    };
}
