//! The cases of sale, for engines that implement [`HasSales`](crate::HasSales).

pub mod buy;
pub mod concurrent;
pub mod dead;
pub mod fixtures;
pub mod history;
pub mod operator;
pub mod product;
pub mod restart;
pub mod transitions;

/// Generates one test for each case of sale. The fixture is a path from `crate`.
#[macro_export]
macro_rules! sale_suite {
    ($fixture:ty) => {
        $crate::suite_tests! { $fixture, sale;
            product: [
                a_new_product_is_upcoming_with_all_its_stock,
                a_sku_is_taken_once,
                a_sale_must_start_in_the_future,
                products_are_listed_by_sku,
                terms_change_until_the_start,
                an_unknown_product_cannot_be_changed_or_deleted,
                a_deleted_product_is_gone_with_its_purchases,
                a_product_created_again_starts_anew,
            ],
            buy: [
                each_buyer_gets_one_unit_and_a_number,
                a_buyer_gets_one_unit_in_a_batch,
                a_buyer_sees_the_purchase_in_every_state,
                nothing_is_sold_before_the_start_or_after_the_end,
                the_last_unit_ends_the_sale,
                an_unknown_sku_is_not_an_error,
                sales_in_one_batch_do_not_disturb_each_other,
                a_purchase_is_found_immediately_by_its_sku_or_as_the_latest,
                buyer_ids_differ_by_every_character,
            ],
            operator: [
                an_operator_ends_an_active_sale_for_ever,
                a_sale_that_was_over_or_sold_out_is_not_ended_again,
                a_sale_is_extended_until_it_has_ended,
                nothing_is_sold_once_an_operator_has_ended_the_sale,
                only_unused_products_are_deleted_where_resets_are_disabled,
                purchases_are_listed_in_order_of_time_and_number,
            ],
            transitions: [
                states_change_on_time,
                storing_the_states_changes_no_purchase,
                the_snapshot_shows_upcoming_active_and_ended_sales,
            ],
            concurrent: [
                many_buyers_get_exactly_the_stock,
                a_buyer_with_parallel_calls_gets_one_unit,
                two_servers_sell_exactly_the_stock,
                batches_over_many_sales_do_not_deadlock,
                a_reset_under_load_leaves_nothing_behind,
                nothing_is_sold_after_the_end_of_a_sale_under_load,
            ],
            restart: [
                everything_is_unchanged_after_a_restart,
                a_sale_continues_after_a_restart,
            ],
            history: [
                random_histories_match_the_naive_model,
            ],
        }
    };
}
