//! Rows and packs of one claim, in the order of their ids.

use std::collections::HashMap;

use weir_queue::Message;

use super::pack::Pack;

/// How much of each shard was asked for.
pub(super) struct ClaimLimits {
    pub(super) messages: usize,
    pub(super) packs: usize,
}

impl ClaimLimits {
    /// Puts rows and packs together in the order of their ids, shard by shard. Where there may be more of one kind, the other
    /// is taken up to there only; says from where on those shards have to be asked again.
    pub(super) fn merge(
        &self,
        places: &[(i16, i64)],
        rows: Vec<Message>,
        packs: Vec<Pack>,
        messages: &mut Vec<Message>,
    ) -> Vec<(i16, i64)> {
        let mut found: HashMap<i16, (Vec<Message>, Vec<Pack>)> = HashMap::new();
        for row in rows {
            found.entry(row.position.shard.cast_signed()).or_default().0.push(row);
        }
        for pack in packs {
            found.entry(pack.shard).or_default().1.push(pack);
        }
        let mut again = Vec::new();
        for (shard, _) in places {
            let Some((rows, packs)) = found.remove(shard) else { continue };
            let last_row = rows.last().filter(|_| rows.len() >= self.messages).map(|row| row.position.id);
            let last_pack = packs.last().filter(|_| packs.len() >= self.packs).map(|pack| pack.ids.end - 1);
            let end = [last_row, last_pack].into_iter().flatten().min();
            let packed = packs.into_iter().flat_map(|pack| pack.messages);
            let from = messages.len();
            messages.extend(
                rows.into_iter()
                    .chain(packed)
                    .filter(|message| end.is_none_or(|end| message.position.id <= end)),
            );
            messages[from..].sort_unstable_by_key(|message| message.position.id);
            again.extend(end.map(|end| (*shard, end)));
        }
        again
    }
}

#[cfg(test)]
mod tests {
    use weir_queue::Position;

    use super::*;

    fn message(shard: u16, id: i64) -> Message {
        Message { position: Position { shard, id }, key: String::new(), payload: Vec::new(), attempts: 0 }
    }

    fn pack(shard: u16, ids: std::ops::Range<i64>) -> Pack {
        let messages = ids.clone().map(|id| message(shard, id)).collect();
        Pack { shard: shard.cast_signed(), ids, messages, has_delayed: false }
    }

    /// What comes, and from where on to ask again.
    type Merged = (Vec<(u16, i64)>, Vec<(i16, i64)>);

    fn merged(asked: &ClaimLimits, rows: &[(u16, i64)], packs: Vec<Pack>) -> Merged {
        let rows = rows.iter().map(|(shard, id)| message(*shard, *id)).collect();
        let mut messages = Vec::new();
        let again = asked.merge(&[(0, i64::MIN), (1, i64::MIN)], rows, packs, &mut messages);
        (messages.iter().map(|message| (message.position.shard, message.position.id)).collect(), again)
    }

    #[test]
    fn rows_and_packs_come_in_the_order_of_their_ids() {
        let asked = ClaimLimits { messages: 10, packs: 10 };
        let packs = vec![pack(0, 5..7), pack(0, 20..21), pack(1, 1..2)];
        let (messages, again) = merged(&asked, &[(0, 1), (0, 9), (1, 3)], packs);
        assert_eq!(messages, [(0, 1), (0, 5), (0, 6), (0, 9), (0, 20), (1, 1), (1, 3)]);
        assert!(again.is_empty());
    }

    #[test]
    fn where_there_may_be_more_of_one_kind_the_other_goes_no_further() {
        let (messages, again) = merged(
            &ClaimLimits { messages: 2, packs: 10 },
            &[(0, 1), (0, 9)],
            vec![pack(0, 5..7), pack(0, 20..21)],
        );
        assert_eq!((messages, again), (vec![(0, 1), (0, 5), (0, 6), (0, 9)], vec![(0, 9)]));
        let (messages, again) =
            merged(&ClaimLimits { messages: 10, packs: 1 }, &[(1, 1), (1, 9)], vec![pack(1, 5..7)]);
        assert_eq!((messages, again), (vec![(1, 1), (1, 5), (1, 6)], vec![(1, 6)]));
    }

    #[test]
    fn a_pack_of_which_all_are_held_back_still_counts_as_read() {
        let mut held_back = pack(0, 5..7);
        held_back.messages.clear();
        let (messages, again) =
            merged(&ClaimLimits { messages: 10, packs: 1 }, &[(0, 1), (0, 9)], vec![held_back]);
        assert_eq!((messages, again), (vec![(0, 1)], vec![(0, 6)]));
    }
}
