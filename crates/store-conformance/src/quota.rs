//! The cases of quota and of the queue behind it, for engines that implement [`HasQuota`](crate::HasQuota).

pub mod audit;
pub mod concurrent;
pub mod configure;
pub mod history;
pub mod keys;
pub mod limits;
pub mod queue_claim;
pub mod queue_dead;
pub mod queue_history;
pub mod queue_lease;
pub mod queue_replay;
pub mod queue_retry;
pub mod queue_settle;
pub mod queue_wait;
pub mod queue_workers;
pub mod restart;
pub mod send;
pub mod servers;
pub mod window;

/// Generates one test for each case of quota. The fixture is a path from `crate`.
#[macro_export]
macro_rules! quota_suite {
    ($fixture:ty) => {
        $crate::suite_tests! { $fixture, quota;
            configure: [
                a_new_engine_is_empty_and_its_clock_shows_the_start,
                configure_creates_a_row_with_nothing_spent,
                configure_again_replaces_the_limits_and_starts_the_count_again,
                configure_again_lets_a_denied_user_send_at_once,
                configure_touches_no_other_user,
                find_of_an_unknown_user_is_none,
                find_counts_the_sends_of_the_current_window,
                remove_returns_whether_there_was_a_row,
                a_removed_user_is_not_configured,
                a_user_configured_after_removal_starts_afresh,
                awkward_user_ids_are_distinct_users,
                the_largest_limits_hold,
            ],
            send: [
                an_unknown_user_is_not_configured_and_nothing_is_enqueued,
                an_empty_batch_has_no_outcomes,
                exactly_the_limit_is_accepted_in_order,
                a_denial_changes_nothing,
                counts_carry_over_from_batch_to_batch,
                a_mixed_batch_answers_in_the_order_of_its_commands,
                a_large_batch_is_decided_whole,
                outcomes_carry_the_limits_and_the_stores_time,
                message_ids_are_unique_within_and_across_batches,
            ],
            keys: [
                a_key_gets_the_same_answer_and_no_second_message,
                a_key_used_for_another_message_is_a_conflict,
                a_denial_and_a_missing_user_are_not_recorded,
                a_used_key_is_answered_over_the_limit_and_after_removal,
                a_key_is_free_after_a_day_and_purged_in_batches,
                parallel_sends_with_one_key_are_one_message,
                sends_with_and_without_keys_share_the_limit,
                keys_survive_a_restart,
                servers_share_keys,
            ],
            limits: [
                changed_limits_keep_the_window_and_its_count,
                a_count_above_the_new_limit_stays_and_sends_wait_for_the_window,
                a_kept_count_is_forgotten_with_its_window,
                changed_limits_lift_a_denial_at_once,
                changed_limits_create_a_user_and_revive_no_window,
                users_are_listed_page_by_page_as_they_count_now,
            ],
            window: [
                retry_after_is_exact_to_the_microsecond,
                a_window_ends_after_its_last_microsecond_and_the_next_counts_from_1,
                a_send_after_the_window_starts_a_new_one_at_its_own_time,
                reading_an_expired_window_shows_0_and_does_not_move_it,
                each_users_window_ends_independently,
                a_denied_send_does_not_lengthen_the_window,
                a_clock_set_back_denies_nobody_for_longer_than_a_window,
                a_clock_that_jumps_ahead_and_back_grants_at_most_one_extra_window,
            ],
            concurrent: [
                parallel_batches_never_pass_the_limit,
                parallel_sends_at_the_end_of_a_window_never_pass_the_limit,
                parallel_batches_naming_users_in_any_order_all_succeed,
                parallel_first_configurations_leave_one_row,
                configuring_and_removing_while_sending_keeps_the_books,
                the_queue_keeps_the_order_in_which_parallel_sends_were_accepted,
            ],
            history: [
                random_histories_match_the_model,
            ],
            queue_claim: [
                every_accepted_message_is_claimable_as_its_event,
                awkward_messages_arrive_unchanged,
                awkward_user_ids_arrive_as_keys,
                claims_keep_the_order_of_each_key,
                a_claim_hands_out_at_most_max,
                a_claim_of_0_messages_returns_and_leases_nothing,
                a_claim_may_ask_for_any_number,
                an_empty_claim_holds_nothing_back,
                an_unknown_topic_has_nothing_to_claim,
                messages_of_a_removed_user_are_still_delivered,
                a_large_claim_is_settled_whole,
            ],
            queue_lease: [
                no_key_is_in_two_claims_at_once,
                a_message_sent_while_its_key_is_leased_waits_for_the_settlement,
                unsettled_messages_are_redelivered_in_order_after_the_visibility_timeout,
                a_lease_lasts_to_its_last_microsecond,
                an_expired_lease_settles_nothing,
                a_stale_receipt_settles_nothing_and_the_new_holder_settles_all,
                a_settled_receipt_settles_nothing_more,
                an_old_receipt_does_not_end_a_newer_lease,
                a_lease_ends_when_the_clock_is_set_back_before_its_start,
            ],
            queue_settle: [
                done_messages_are_never_redelivered,
                messages_not_in_the_settlement_are_claimable_again_at_once,
                one_settlement_may_mix_all_dispositions,
                a_settlement_touches_no_shard_it_does_not_hold,
                a_position_named_twice_counts_once,
                an_unknown_position_counts_nothing,
                done_and_dead_messages_cannot_be_settled_again,
                an_empty_claim_may_be_settled,
                a_deferred_message_is_redelivered_and_counts_no_attempt,
                deferred_messages_are_settled_individually_without_a_lease,
            ],
            queue_retry: [
                a_retried_message_is_hidden_until_its_time,
                a_retried_message_holds_back_its_key_and_no_other,
                a_retry_without_delay_is_claimable_at_once,
                each_retry_counts_one_attempt,
                later_retries_of_a_key_wait_for_earlier_ones,
                an_earlier_retry_does_not_wait_for_a_later_one,
                a_retry_scheduled_before_the_clock_was_set_back_keeps_its_delay,
            ],
            queue_wait: [
                wait_returns_when_something_was_sent_before,
                wait_returns_when_something_is_sent_while_waiting,
                wait_returns_after_its_timeout,
            ],
            queue_workers: [
                eight_workers_deliver_each_message_once_and_in_order,
                messages_sent_while_workers_run_are_delivered_once_and_in_order,
            ],
            queue_dead: [
                a_dead_letter_has_key_payload_reason_attempts_and_time,
                dead_letters_are_counted_by_topic,
                a_list_cuts_payload_and_reason_to_the_requested_length,
                a_dead_message_does_not_hold_back_later_ones,
                a_dead_letter_says_how_often_it_was_tried,
                dead_letters_are_read_page_by_page,
                paging_continues_after_a_letter_that_was_removed,
                a_discarded_letter_is_gone,
                awkward_reasons_are_stored_unchanged,
                unknown_ids_are_an_answer_not_an_error,
            ],
            queue_replay: [
                a_replayed_letter_returns_to_its_position_with_no_attempts,
                a_replayed_letter_keeps_its_position_before_messages_sent_since,
                a_replayed_letter_does_not_wait_for_a_later_retry,
                a_replayed_letter_waits_while_its_key_is_leased,
                a_replayed_letter_can_die_again,
                replay_all_replays_every_letter_in_order,
            ],
            queue_history: [
                random_histories_deliver_in_order_and_lose_nothing,
            ],
            audit: [
                the_quota_books_count_users_and_nobody_is_over_the_limit,
                the_queue_books_are_right_after_every_step,
                denied_and_unknown_sends_are_not_in_the_books,
                the_books_of_an_unknown_topic_are_empty,
            ],
            restart: [
                counts_and_windows_survive,
                a_removed_user_stays_removed,
                queued_messages_survive_in_order,
                retries_survive_with_their_time_and_attempts,
                dead_letters_survive,
                the_books_survive,
                claimed_messages_are_redelivered_after_a_restart,
                a_receipt_from_before_a_restart_settles_nothing,
                messages_sent_after_a_restart_come_after_older_ones,
            ],
            servers: [
                servers_share_one_limit,
                no_key_is_leased_on_two_servers,
                workers_on_two_servers_deliver_each_message_once_and_in_order,
                a_restart_of_one_server_ends_no_lease_of_the_other,
            ],
        }
    };
}
