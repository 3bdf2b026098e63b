//! The cases of slot, for engines that implement [`HasSlots`](crate::HasSlots).

pub mod assign;
pub mod concurrent;
pub mod config;
pub mod due;
pub mod fixtures;

/// One test per case of slot, against the fixture named.
#[macro_export]
macro_rules! slot_suite {
    ($fixture:ty) => {
        $crate::tests_of! { $fixture, slot;
            config: [
                a_config_has_versions_and_the_last_one_is_active,
                a_config_out_of_service_is_unknown_until_it_is_put_again,
                configs_are_listed_by_name,
                a_raised_maximum_reopens_full_windows,
                a_lowered_maximum_closes_windows_and_takes_nothing_away,
                a_new_size_counts_what_is_already_scheduled_in_each_window,
            ],
            assign: [
                events_fill_their_window_and_then_the_next_ones,
                a_window_that_has_begun_offers_its_share,
                an_event_keeps_its_slot_whatever_comes_with_it_later,
                an_event_twice_in_a_batch_has_one_slot,
                an_unknown_config_is_an_answer,
                far_events_do_not_disturb_near_ones,
                gaps_between_full_windows_are_found,
                a_gap_before_a_long_run_of_full_windows_does_not_end_the_search,
                room_scattered_between_long_runs_of_full_windows_is_all_found,
                a_place_given_back_is_taken_again,
                windows_are_listed_in_order,
                slots_survive_a_restart,
                times_before_1970_are_times,
                behind_the_last_window_of_all_is_no_room,
                random_histories_are_placed_as_by_the_naive_walk,
            ],
            due: [
                slots_come_at_their_time_and_in_its_order,
                what_is_out_is_nobody_elses_until_its_lease_ends,
                enqueued_slots_are_on_the_topic_once_and_in_order,
                what_was_not_published_comes_again,
                a_slot_given_back_is_not_dispatched,
                slots_from_before_are_noted_if_they_are_still_to_come,
                what_is_noted_survives_a_restart,
                nothing_is_noted_unless_asked,
                two_servers_dispatch_each_slot_once_and_in_order,
            ],
            concurrent: [
                parallel_batches_overfill_no_window_and_counters_equal_slots,
                the_same_events_in_parallel_get_one_slot_each,
                giving_back_while_assigning_keeps_the_books,
                two_servers_overfill_no_window_and_give_each_event_one_slot,
                bulks_and_single_calls_at_once_all_get_slots,
                bulks_and_single_calls_on_two_servers_all_get_slots,
                a_pace_that_changes_under_load_keeps_the_books,
            ],
        }
    };
}
