//! Ports, connections and rooms: what the RDMA ports that a room's engines use, and the connections of its ranks, moved while its KV
//! cache could.
//!
//! Pure: no I/O, no clock (time is an argument). As with GPUs: a port is a whole port, connections are those of a whole process, and
//! nothing is divided among rooms.

use std::sync::Arc;

use crate::event::Mono;
use crate::gpu::windows::{Link, Track};
use crate::network::model::{Network, Port, Reading};
use crate::rooms::gpus::together;
use crate::rooms::model::{NetworkWindow, Role, RoomSnapshot};
use crate::rooms::room::Room;
use crate::rooms::table::RoomTable;

/// Windows of one room at most: two sides of a host with 16 ports.
const MAX_WINDOWS: usize = 32;

/// What the window of a process's connections is called.
const CONNECTIONS: &str = "connections";

/// Where a side stands in time: from, to, and how many rooms overlap.
type Time = (Mono, Mono, Option<u32>);

impl RoomTable {
    /// What RDMA ports and the engines' own connections moved.
    pub const fn network(&self) -> &Network {
        &self.network
    }

    pub(crate) fn network_read(&mut self, reading: &Reading) {
        self.gpus.begin(reading.at);
        self.network.take(reading);
    }

    /// What moved over the network while the room's KV cache could.
    pub(crate) fn network_windows(&self, room: &Room, at: Mono) -> Vec<NetworkWindow> {
        let mut all = Vec::new();
        if self.network.is_empty() {
            return all;
        }
        for (role, m) in [Role::Prefill, Role::Decode].into_iter().zip(room.moves) {
            let Some((from, to, overlapping)) = self.gpus.time(role, m, at) else { continue };
            let time = (from, to, overlapping);
            let ranks = self.ranks(room, role);
            let ports = self.ports_of(&ranks);
            all.extend(ports.map(|(name, port)| of_port(role, name, port, time)));
            let tracks = ranks.iter().filter_map(|pid| Some((*pid, self.network.of(*pid)?)));
            all.extend(tracks.map(|(pid, track)| of_process(role, pid, track, time)));
        }
        all.truncate(MAX_WINDOWS);
        all
    }

    /// Ports that these processes can use.
    pub(super) fn ports_of(&self, ranks: &[u32]) -> impl Iterator<Item = (&Arc<str>, &Port)> {
        let named: Vec<&str> = ranks.iter().flat_map(|pid| self.engines.ib_devices(*pid)).collect();
        // Of an engine that names none, any card can be one.
        self.network.ports().filter(move |(name, _)| {
            let device = name.split_once('/').map_or(&***name, |(device, _)| device);
            named.is_empty() || named.contains(&device)
        })
    }

    /// Adds the single readings to what was collected of a room.
    pub(crate) fn add_network_series(&self, snapshot: &mut RoomSnapshot) {
        let (from, to) = (snapshot.opened_at, snapshot.at);
        for window in &mut snapshot.network {
            let track = match window.pid {
                Some(pid) => self.network.of(pid),
                None => self.network.port_named(&window.name).map(|port| &port.track),
            };
            if let Some(track) = track {
                together(track.stretches(from, to), &mut window.series);
            }
        }
    }
}

fn of_port(role: Role, name: &Arc<str>, port: &Port, time: Time) -> NetworkWindow {
    let (from, to, _) = time;
    let faults = port.faults(from, to).collect();
    NetworkWindow { faults, ..window(Link::Rdma, role, Arc::clone(name), None, &port.track, time) }
}

fn of_process(role: Role, pid: u32, track: &Track, time: Time) -> NetworkWindow {
    window(Link::Tcp, role, Arc::from(CONNECTIONS), Some(pid), track, time)
}

fn window(
    link: Link,
    role: Role,
    name: Arc<str>,
    pid: Option<u32>,
    track: &Track,
    (from, to, overlapping): Time,
) -> NetworkWindow {
    NetworkWindow {
        name,
        link,
        role,
        pid,
        from,
        to,
        moved: track.window(from, to),
        overlapping,
        faults: Vec::new(),
        series: Vec::new(),
    }
}
