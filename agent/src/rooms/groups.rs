//! Ranks that must agree on how a room has ended, and whether all of them are seen from this host.
//!
//! Pure; reads the table. SGLang takes the minimum of what the ranks of one DP group say: at decode over the tensor-parallel
//! ranks, at prefill over the context-parallel ones too (`poll_and_all_reduce`, `poll_and_all_reduce_attn_cp_tp_group`,
//! `disaggregation/utils.py` of 0.5.23), and pipeline ranks by consensus. So one rank elsewhere holds up, or fails, all.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::http::event::RankRegistration;
use crate::rooms::model::Role;
use crate::rooms::peers::{EndpointId, NONE};
use crate::rooms::room::{MAX_LINKS, Room};
use crate::rooms::table::RoomTable;
use crate::verdict::facts::Elsewhere;
use crate::verdict::model::Party;

/// Endpoints of a group named at most.
const MAX_NAMED: usize = 8;

/// The group of a prefill rank, as it registered. Part of the state file's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Group {
    /// Its bootstrap server and its DP rank, which name the group.
    pub(crate) server: SocketAddr,
    pub(crate) dp: u32,
    /// How many ranks it has.
    pub(crate) ranks: u32,
    /// Number of this one among them, as STATUS has it.
    pub(crate) rank: u32,
}

impl Group {
    /// `None` where it does not say its size.
    pub(crate) fn of(server: SocketAddr, r: &RankRegistration) -> Option<Self> {
        let one = |n: Option<u32>| n.unwrap_or(1).max(1);
        let place = |n: Option<u32>| n.unwrap_or(0);
        let (mut tp, cp, pp) = (r.tp_size?.max(1), one(r.cp_size), one(r.pp_size));
        let (mut rank, mut dp) = (place(r.tp_rank), place(r.dp_rank));
        if r.system_dp_size.is_some_and(|n| n > 1) {
            dp = place(r.system_dp_rank);
        } else if r.system_dp_size.is_none() && one(r.dp_size) > 1 {
            // Up to 0.4.10 ranks are counted over all DP groups.
            tp = (tp / one(r.dp_size)).max(1);
            (dp, rank) = (rank / tp, rank % tp);
        }
        let ranks = tp.checked_mul(cp)?.checked_mul(pp)?;
        let rank = rank.checked_mul(pp.checked_mul(cp)?)?;
        let rank = rank.checked_add(place(r.pp_rank).checked_mul(cp)?)?.checked_add(place(r.cp_rank))?;
        Some(Self { server, dp, ranks, rank })
    }

    /// Whether both are of the same one.
    pub(crate) fn is_with(&self, other: &Self) -> bool {
        (self.server, self.dp, self.ranks) == (other.server, other.dp, other.ranks)
    }
}

impl RoomTable {
    /// Ranks of prefill that have a say in this room and are not of this host, where there are any.
    pub(crate) fn elsewhere(&self, room: &Room, http: Option<SocketAddr>) -> Option<Elsewhere> {
        let mut here: SmallVec<[EndpointId; 8]> = SmallVec::new();
        for l in room.links.iter().filter(|l| l.received.is_some() || l.told.is_some()) {
            if !here.contains(&l.prefill) {
                here.push(l.prefill);
            }
        }
        // Some may have found no place.
        if room.links.len() >= MAX_LINKS || here.contains(&NONE) {
            return None;
        }
        let group = here.iter().find_map(|id| self.peers.prefill(*id)?.group);
        let ranks = group.map_or(0, |g| g.ranks).max(self.asked_by_decode(room));
        let count = |list: &[EndpointId]| u32::try_from(list.len()).unwrap_or(u32::MAX);
        if ranks <= count(&here) {
            return None;
        }
        let hosts: SmallVec<[_; 2]> =
            here.iter().filter_map(|id| self.peers.address(*id)).map(|a| a.ip()).collect();
        let mut absent = Vec::new();
        for (id, e) in self.peers.endpoints() {
            let theirs = e.prefill.as_deref().and_then(|p| p.group);
            let Some(theirs) = theirs.filter(|t| group.is_some_and(|g| g.is_with(t))) else { continue };
            if here.contains(&id) {
                continue;
            }
            // Of this host, and with nothing to do in this room: context-parallel ranks often have not.
            if e.task.is_some() || hosts.contains(&e.address.ip()) {
                here.push(id);
            } else if absent.len() < MAX_NAMED {
                absent.push((e.address, theirs.rank));
            }
        }
        let seen = count(&here);
        if ranks <= seen {
            return None;
        }
        // Which of several says nothing is not known.
        let only = absent.first().filter(|_| ranks - seen == 1 && absent.len() == 1);
        let party = Party {
            role: Some(Role::Prefill),
            rank: only.map(|(_, rank)| *rank),
            endpoint: only.map(|(at, _)| *at),
            local: Some(false),
            http,
            ..Party::default()
        };
        Some(Elsewhere { ranks, seen, known: absent.into_iter().map(|(at, _)| at).collect(), party })
    }

    /// The fewest tensor-parallel ranks that prefill can have, each rank being asked by as many of decode's as it waits for:
    /// `required_dst_info_num` is decode's size over prefill's (`disaggregation/common/conn.py`). 0: not known.
    fn asked_by_decode(&self, room: &Room) -> u32 {
        let fewest = |l: &crate::rooms::room::Link| {
            let list = &self.peers.prefill(l.prefill)?.registered;
            let size = list.iter().find(|r| r.session == l.session)?.tp_size?;
            let each = room.required_at(l.prefill).max(room.sessions_at(l.prefill)).max(1);
            Some(size.div_ceil(each))
        };
        room.links.iter().filter(|l| l.received.is_some()).filter_map(fewest).max().unwrap_or(0)
    }

    /// How many ranks the tensor-parallel group of a decode rank has, as it has introduced itself. Decode's pipeline ranks are
    /// not among them: nothing tells of them.
    pub(crate) fn decode_ranks(&self, decode: EndpointId) -> Option<u32> {
        let own = self.peers.pairs().filter(|p| p.decode == decode);
        let sizes = own.filter_map(|p| {
            let list = &self.peers.prefill(p.prefill)?.registered;
            list.iter().find(|r| r.session == p.session && r.decode == decode)?.tp_size
        });
        sizes.max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(r: &RankRegistration) -> Option<(u32, u32, u32)> {
        let server = SocketAddr::from(([10, 0, 0, 1], 8998));
        Group::of(server, r).map(|g| (g.dp, g.ranks, g.rank))
    }

    #[test]
    fn a_group_is_of_one_dp_rank_whatever_the_release_counts() {
        let of = |tp, tps| RankRegistration {
            tp_rank: Some(tp),
            tp_size: Some(tps),
            ..RankRegistration::default()
        };
        assert_eq!(group(&RankRegistration::default()), None, "no size");
        assert_eq!(group(&of(1, 4)), Some((0, 4, 1)));
        // Up to 0.4.10: four ranks of two DP groups.
        assert_eq!(group(&RankRegistration { dp_size: Some(2), ..of(3, 4) }), Some((1, 2, 1)));
        // DP attention: the size is that of the group.
        let attention = RankRegistration {
            dp_size: Some(2),
            dp_rank: Some(1),
            system_dp_size: Some(1),
            system_dp_rank: Some(0),
            ..of(1, 2)
        };
        assert_eq!(group(&attention), Some((1, 2, 1)));
        let whole = RankRegistration {
            dp_size: Some(1),
            dp_rank: Some(0),
            system_dp_size: Some(4),
            system_dp_rank: Some(3),
            ..of(0, 2)
        };
        assert_eq!(group(&whole), Some((3, 2, 0)));
        let parts = RankRegistration {
            cp_rank: Some(1),
            cp_size: Some(2),
            pp_rank: Some(2),
            pp_size: Some(3),
            system_dp_size: Some(1),
            ..of(1, 2)
        };
        assert_eq!(group(&parts), Some((0, 12, 11)), "tp * (pp_size * cp_size) + pp * cp_size + cp");
        assert_eq!(
            group(&RankRegistration { cp_size: Some(u32::MAX), ..of(1, u32::MAX) }),
            None,
            "no such engine"
        );
    }
}
