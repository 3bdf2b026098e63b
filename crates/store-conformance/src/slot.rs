//! The cases of slot, for engines that implement [`HasSlots`](crate::HasSlots).

pub mod assign;
pub mod concurrent;
pub mod config;
pub mod due;
pub mod fixtures;
pub mod retention;

/// Generates one test for each case of slot. The fixture is a path from `crate`.
#[macro_export]
macro_rules! slot_suite {
    ($fixture:ty) => {
        $crate::suite_tests! { $fixture, slot;
            config: [
                a_config_has_versions_and_the_last_one_is_active,
                the_versions_of_a_config_are_listed_newest_first,
                a_deactivated_config_is_unknown_until_it_is_put_again,
                configs_are_listed_by_name,
                a_raised_maximum_reopens_full_windows,
                a_lowered_maximum_closes_windows_and_revokes_no_slot,
                a_new_size_counts_what_is_already_scheduled_in_each_window,
            ],
            assign: [
                events_fill_their_window_and_then_the_next_ones,
                a_window_that_has_begun_offers_its_share,
                an_event_keeps_its_slot_when_it_is_assigned_again,
                an_event_twice_in_a_batch_has_one_slot,
                an_unknown_config_is_not_an_error,
                far_events_do_not_disturb_near_ones,
                gaps_between_full_windows_are_found,
                a_gap_before_a_long_run_of_full_windows_does_not_end_the_search,
                all_gaps_between_long_runs_of_full_windows_are_found,
                a_slot_given_back_is_assigned_again,
                an_event_that_is_moved_gets_another_slot_and_frees_its_place,
                an_event_that_cannot_be_moved_keeps_its_slot,
                windows_are_listed_in_order,
                the_slots_of_a_window_are_listed_in_order_of_time_and_event,
                slots_survive_a_restart,
                times_before_1970_are_valid,
                after_the_last_representable_window_events_are_refused,
                random_histories_match_the_naive_walk,
            ],
            due: [
                due_slots_are_taken_on_time_and_in_order,
                taken_slots_are_unavailable_until_their_lease_ends,
                enqueued_slots_are_on_the_topic_once_and_in_order,
                slots_that_were_not_published_are_taken_again,
                a_slot_given_back_is_not_dispatched,
                an_event_that_is_moved_is_dispatched_at_its_new_time,
                existing_slots_are_scheduled_for_dispatch_if_still_in_the_future,
                scheduled_dispatches_survive_a_restart,
                no_dispatch_is_scheduled_unless_the_store_dispatches,
                two_servers_dispatch_each_slot_once_and_in_order,
            ],
            retention: [
                windows_that_ended_before_the_retention_are_purged,
                an_event_whose_slot_was_purged_is_new,
                a_purge_in_parts_leaves_whole_books_after_each,
                the_window_behind_a_full_one_is_found_while_older_ones_are_purged,
                a_purge_counts_windows_by_the_newest_version,
                versions_that_were_replaced_before_the_retention_are_purged,
                slots_that_wait_to_be_dispatched_are_not_purged,
                purging_while_assigning_giving_back_and_moving_keeps_the_books,
            ],
            concurrent: [
                parallel_batches_overfill_no_window_and_counters_equal_slots,
                the_same_events_in_parallel_get_one_slot_each,
                giving_back_while_assigning_keeps_the_books_balanced,
                moving_while_assigning_and_giving_back_keeps_the_books_balanced,
                two_servers_overfill_no_window_and_give_each_event_one_slot,
                bulks_and_single_calls_at_once_all_get_slots,
                bulks_and_single_calls_on_two_servers_all_get_slots,
                a_pace_that_changes_under_load_keeps_the_books,
            ],
        }
    };
}
