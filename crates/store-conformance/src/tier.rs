//! The cases of tier, for engines that implement [`HasLimits`](crate::HasLimits): what limits decide, and what is defined
//! of them.

pub mod definitions;
pub mod fixtures;
pub mod history;
pub mod holds;
pub mod model;
pub mod plans;
pub mod restart;
pub mod spend;

/// One test per case of tier, against the fixture named.
#[macro_export]
macro_rules! tier_suite {
    ($fixture:ty) => {
        $crate::tests_of! { $fixture, tier;
            spend: [
                a_key_may_spend_its_limit_and_no_more,
                a_bucket_refills_to_the_microsecond,
                a_fixed_window_turns_at_its_end,
                a_sliding_window_fades_to_the_microsecond,
                a_denied_decision_spends_nothing,
                the_costs_of_the_same_key_add_up,
                a_cost_of_nothing_only_looks,
                a_cost_above_the_limit_never_fits,
                a_peek_spends_nothing,
                a_shadow_never_denies,
                keys_and_policies_are_told_apart,
                a_refund_never_fills_past_full,
                a_refund_into_a_past_window_is_worth_nothing,
                a_debt_is_paid_off_first,
                a_forgotten_key_is_as_good_as_new,
                what_was_spent_stays_spent_under_another_limit,
                the_largest_numbers_hold,
                the_slowest_buckets_are_exact,
                parallel_takes_never_pass_the_limit,
                parallel_decisions_over_keys_in_any_order_are_all_or_nothing,
                servers_that_count_together_never_pass_the_limit,
            ],
            plans: [
                a_free_user_has_8_at_once_and_5_a_minute,
                a_day_that_is_used_up_is_told_first,
                a_denied_minute_spends_nothing_of_the_day,
                a_new_plan_keeps_what_was_spent,
                parallel_calls_of_a_free_user_pass_8_times,
                two_servers_pass_a_free_user_8_times,
            ],
            definitions: [
                a_subscription_is_put_found_and_ended,
                tiers_are_set_and_set_again,
                policies_keep_their_number_until_they_end,
                a_file_leaves_what_operators_made,
                what_was_kept_is_read_in_order_and_by_pages,
                changes_are_told_in_order,
            ],
            holds: [
                a_hold_is_settled_once,
                a_hold_expires_at_its_very_end,
                an_unknown_hold_is_an_answer,
                parallel_settlements_correct_once,
                every_hold_is_open_settled_or_expired,
                old_holds_are_forgotten,
            ],
            restart: [
                what_was_spent_is_there_after_a_restart,
                what_was_forgotten_stays_so_after_a_restart,
                definitions_and_holds_are_there_after_a_restart,
                what_was_spent_before_it_was_kept_is_in_the_store,
                a_clock_that_is_set_back_keeps_nobody_out_for_longer_than_the_limit_says,
            ],
            history: [
                random_histories_are_those_of_the_naive_model,
            ],
        }
    };
}
