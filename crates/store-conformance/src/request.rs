//! The cases of request, for engines that implement [`HasRequests`](crate::HasRequests).

pub mod callback;
pub mod claim;
pub mod concurrent;
pub mod dead;
pub mod fixtures;
pub mod history;
pub mod lease;
pub mod limits;
pub mod model;
pub mod reads;
pub mod report;
pub mod restart;
pub mod sealing;
pub mod submit;
pub mod upkeep;
pub mod wait;
pub mod webhooks;

/// One test per case of request, against the fixture named.
#[macro_export]
macro_rules! request_suite {
    ($fixture:ty) => {
        $crate::tests_of! { $fixture, request;
            submit: [
                a_new_engine_is_empty_and_stands_at_the_start,
                a_new_submission_is_accepted_and_read_back_as_it_was_sent,
                the_same_submission_is_replayed_with_the_status_it_has_by_now,
                another_payload_under_a_used_key_is_a_conflict_and_changes_nothing,
                fingerprints_are_compared_to_their_last_bit,
                tenants_may_use_the_same_keys,
                a_key_is_free_again_after_a_day_to_the_microsecond,
                a_submission_twice_in_a_batch_is_accepted_once,
                a_mixed_batch_is_answered_in_its_order,
                an_empty_batch_answers_empty,
                a_large_batch_is_taken_whole,
                awkward_keys_tenants_and_types_are_kept_apart_and_unchanged,
                payloads_are_bytes_of_any_value_and_length,
                what_a_broker_has_to_take_is_pending_enqueue,
            ],
            limits: [
                exactly_the_limit_is_accepted,
                counts_carry_over_from_batch_to_batch,
                a_window_turns_at_its_very_end_and_says_when,
                replays_and_conflicts_do_not_count,
                each_tenant_has_its_own_window,
                without_limits_nothing_is_limited_nor_counted,
                other_limits_hold_from_the_next_batch_on,
            ],
            reads: [
                an_unknown_request_is_none,
                requests_are_listed_the_newest_first,
                what_is_listed_is_what_is_found,
                summaries_are_found_by_id_without_what_may_be_large,
                lists_are_read_page_by_page,
                lists_may_be_of_one_status,
                a_list_of_a_rare_status_ends_and_says_where_to_go_on,
                tenants_see_their_own_requests_only,
            ],
            claim: [
                a_job_is_the_request_as_it_was_sent,
                a_claim_brings_no_more_bytes_than_it_may,
                jobs_come_in_the_order_in_which_they_became_due,
                a_job_that_is_put_off_comes_before_those_due_later,
                each_downstream_has_its_own_room,
                without_room_nothing_is_claimed_or_held,
                a_claim_in_vain_says_how_long_to_wait,
                what_a_broker_does_not_have_may_be_claimed_all_the_same,
                downstreams_are_listed_once_while_jobs_wait_for_them,
                awkward_names_of_downstreams_are_kept_apart,
                named_requests_are_claimed_and_no_others,
                a_named_request_that_cannot_be_claimed_is_left_out,
                a_large_claim_is_worked_off_whole,
            ],
            lease: [
                a_lease_lasts_to_its_last_microsecond,
                a_named_claim_takes_over_at_the_very_end_of_a_lease_too,
                a_job_claimed_again_has_a_higher_token_and_counts_an_attempt,
                a_late_worker_changes_nothing,
                a_report_after_the_lease_counts_while_nobody_else_has_claimed,
                a_request_that_kills_its_workers_becomes_a_dead_letter,
                a_named_claim_gives_up_what_has_no_attempt_left,
                a_worker_of_a_request_given_up_is_told_so,
                a_callback_that_never_comes_costs_an_attempt_and_then_the_request,
                the_lease_is_that_of_the_policy_claimed_with,
                a_clock_that_is_set_back_holds_up_no_request,
            ],
            report: [
                a_completed_request_has_its_result_and_no_job,
                a_completed_request_may_have_no_result,
                a_rejected_request_says_why_and_is_no_dead_letter,
                a_retry_waits_as_long_as_chance_decides,
                a_retry_waits_as_long_as_the_downstream_asks_within_bounds,
                the_last_retry_in_vain_makes_a_dead_letter,
                a_failed_attempt_shows_until_one_succeeds,
                a_request_taken_over_waits_for_its_callback,
                a_call_that_was_not_made_costs_no_attempt,
                what_is_final_takes_no_report,
                what_was_not_claimed_takes_no_report,
                a_mixed_batch_of_reports_is_answered_in_its_order,
                an_empty_batch_of_reports_answers_empty,
                awkward_details_are_kept,
            ],
            webhooks: [
                every_end_is_put_on_the_topic_once,
                without_an_address_nobody_is_told,
                nobody_is_told_before_the_end,
                what_is_refused_tells_nobody,
                a_dead_letter_that_ends_again_is_told_again,
                whoever_waits_for_the_topic_is_woken_by_every_end,
            ],
            callback: [
                a_callback_ends_the_wait,
                a_callback_may_say_that_it_failed_and_why,
                a_callback_may_come_before_the_workers_report,
                a_callback_may_come_between_attempts,
                a_repeated_callback_is_refused_and_changes_nothing,
                a_callback_for_an_unknown_request_is_an_answer,
                a_callback_before_anybody_called_is_refused,
                a_callback_for_a_dead_letter_is_refused_until_it_is_called_again,
                what_a_callback_says_is_kept_unchanged,
            ],
            dead: [
                a_dead_letter_is_the_request_and_when_it_died,
                a_payload_that_is_too_long_for_a_list_is_left_out,
                dead_letters_are_read_page_by_page,
                a_replayed_letter_starts_again_with_all_its_attempts,
                a_worker_from_before_a_replay_stays_late,
                only_dead_letters_are_replayed_or_discarded,
                a_letter_is_replayed_once,
                some_letters_are_replayed_at_once,
                a_discarded_letter_is_off_the_list_and_stays_failed,
            ],
            upkeep: [
                stranded_requests_are_listed_by_age,
                what_the_broker_has_is_accepted,
                a_job_enqueued_late_goes_on_where_it_stands,
                nothing_is_switched_until_somebody_does,
                switches_that_nobody_names_stay_as_they_are,
                old_requests_are_purged_when_they_are_final,
                a_purge_takes_so_many_and_no_more,
                expired_keys_go_at_their_very_time_and_their_requests_stay,
                a_key_that_outlives_its_request_is_free,
                a_replayed_letter_is_not_purged_however_old,
                the_books_follow_every_step,
            ],
            sealing: [
                keys_are_registered_and_forgotten_by_name_and_digest,
                requests_sealed_with_a_key_are_found_part_by_part,
                a_result_sealed_with_a_key_is_found_too,
                the_newest_request_is_the_one_accepted_last,
            ],
            wait: [
                wait_returns_when_something_was_accepted_before,
                wait_returns_when_something_is_accepted_meanwhile,
                wait_returns_when_a_letter_is_replayed,
                wait_returns_by_itself,
            ],
            concurrent: [
                a_hundred_identical_submissions_make_one_request,
                a_hundred_identical_submissions_to_two_servers_make_one_request,
                an_expired_key_is_taken_once,
                different_payloads_under_one_key_leave_one_request,
                batches_naming_keys_in_any_order_all_succeed,
                a_tenants_limit_holds_for_all_servers_together,
                parallel_workers_have_each_job_alone_and_complete_it_once,
                parallel_claims_by_name_have_one_winner,
                a_worker_and_a_callback_end_a_request_once,
                a_dead_letter_is_replayed_or_discarded_by_one,
                a_job_claimed_while_the_broker_takes_it_stays_claimed,
                everything_at_once_keeps_the_books,
            ],
            restart: [
                everything_stands_as_before,
                keys_and_windows_survive,
                leases_survive_and_so_do_their_holders,
                waits_survive_with_their_time,
                tokens_grow_over_restarts_and_replays,
                webhooks_survive,
            ],
            history: [
                random_histories_give_the_models_answers,
            ],
        }
    };
}
