//! The cases of tier, for engines that implement [`HasLimits`](crate::HasLimits): decisions, and definitions of tiers and
//! policies.

pub mod definitions;
pub mod fixtures;
pub mod history;
pub mod holds;
pub mod model;
pub mod permits;
pub mod plans;
pub mod restart;
pub mod spend;

/// Generates one test for each case of tier. The fixture is a path from `crate`.
#[macro_export]
macro_rules! tier_suite {
    ($fixture:ty) => {
        $crate::suite_tests! { $fixture, tier;
            spend: [
                a_key_may_spend_its_limit_and_no_more,
                a_bucket_refills_to_the_microsecond,
                a_fixed_window_ends_on_time,
                a_sliding_window_decays_to_the_microsecond,
                a_denied_decision_spends_nothing,
                the_costs_of_the_same_key_add_up,
                a_cost_of_0_is_always_allowed,
                a_cost_above_the_limit_never_fits,
                a_peek_spends_nothing,
                a_shadow_never_denies,
                keys_and_policies_stay_distinct,
                a_refund_never_fills_past_full,
                a_refund_into_a_past_window_is_worth_nothing,
                a_debt_is_paid_off_first,
                a_forgotten_key_has_spent_nothing,
                what_was_spent_stays_spent_under_another_limit,
                the_largest_numbers_hold,
                the_slowest_buckets_are_exact,
                parallel_takes_never_pass_the_limit,
                parallel_decisions_over_keys_in_any_order_are_all_or_nothing,
                servers_that_share_counts_never_pass_the_limit,
            ],
            plans: [
                a_free_user_has_8_at_once_and_5_a_minute,
                an_exhausted_day_is_reported_before_an_exhausted_minute,
                a_denied_minute_spends_nothing_of_the_day,
                a_new_plan_keeps_what_was_spent,
                parallel_calls_of_a_free_user_pass_8_times,
                two_servers_pass_a_free_user_8_times,
            ],
            definitions: [
                a_subscription_is_put_found_and_deleted,
                a_subscription_is_there_until_it_expires,
                subscriptions_are_listed_in_order_and_page_by_page,
                expired_subscriptions_are_purged_and_others_told,
                parallel_renewals_survive_purges,
                the_switch_of_tier_is_stored,
                tier_limits_are_stored_replaced_and_forgotten,
                policies_keep_their_scope_until_they_are_deleted,
                the_policy_file_does_not_replace_policies_of_operators,
                spent_records_are_loaded_in_order_and_page_by_page,
                changes_are_listed_in_order,
            ],
            holds: [
                a_hold_is_settled_once,
                a_hold_expires_exactly_when_its_time_is_over,
                an_unknown_hold_is_not_an_error,
                parallel_settlements_correct_once,
                every_hold_is_open_settled_or_expired,
                old_holds_are_purged,
            ],
            permits: [
                no_more_permits_are_open_than_the_limit,
                a_permit_ends_exactly_when_its_time_is_over,
                permits_are_taken_together_or_not_at_all,
                voided_and_reset_permits_are_free_at_once,
                parallel_takers_never_pass_the_limit,
                permits_survive_a_restart,
                old_permits_are_purged,
                a_name_is_that_of_one_policy_of_any_kind,
            ],
            restart: [
                spent_amounts_survive_a_restart,
                a_forgotten_key_stays_forgotten_after_a_restart,
                definitions_and_holds_survive_a_restart,
                everything_spent_before_a_flush_is_in_the_store,
                a_clock_set_back_denies_nobody_for_longer_than_the_limit_allows,
            ],
            history: [
                random_histories_match_the_naive_model,
            ],
        }
    };
}
