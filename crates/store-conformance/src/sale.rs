//! The cases of sale, for engines that implement [`HasSales`](crate::HasSales).

pub mod buy;
pub mod concurrent;
pub mod dead;
pub mod fixtures;
pub mod history;
pub mod product;
pub mod restart;
pub mod turn;

/// One test per case of sale, against the fixture named.
#[macro_export]
macro_rules! sale_suite {
    ($fixture:ty) => {
        $crate::tests_of! { $fixture, sale;
            product: [
                a_new_product_is_upcoming_with_all_its_stock,
                a_sku_is_taken_once,
                a_sale_must_be_still_to_come,
                products_are_listed_by_sku,
                terms_change_until_the_start,
                what_is_not_there_cannot_be_changed_or_deleted,
                a_deleted_product_is_gone_with_its_purchases,
                a_product_made_again_starts_anew,
            ],
            buy: [
                each_buyer_gets_one_unit_and_a_number,
                a_buyer_gets_one_unit_in_a_batch,
                a_buyer_is_told_of_the_purchase_whatever_the_state,
                nothing_is_sold_before_the_start_or_from_the_end_on,
                the_last_unit_ends_the_sale,
                an_unknown_sku_is_an_answer,
                sales_in_one_batch_do_not_disturb_each_other,
                a_purchase_is_found_at_once_by_its_sku_or_as_the_latest,
                buyers_are_told_apart_by_every_character,
            ],
            turn: [
                states_turn_at_their_time,
                turning_changes_nothing_that_is_sold,
                the_board_shows_what_is_to_come_what_runs_and_what_ended,
            ],
            concurrent: [
                many_buyers_get_exactly_the_stock,
                one_buyer_at_once_gets_one_unit,
                two_servers_sell_exactly_the_stock,
                batches_over_many_sales_do_not_wait_for_each_other_in_a_circle,
                a_reset_under_load_leaves_nothing_behind,
                the_end_of_a_sale_under_load_is_the_end,
            ],
            restart: [
                everything_stands_as_before,
                a_sale_goes_on_where_it_was,
            ],
            history: [
                random_histories_are_those_of_the_naive_model,
            ],
        }
    };
}
