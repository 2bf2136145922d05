//! The ZMQ sockets of a rank, with the options that SGLang sets.
//!
//! Source: `common/conn.py` 0.5.17–0.5.23, `_connect` of both sides. Sockets are opened at the first message and
//! kept; nothing here knows what the messages say.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};

use crate::wire::Frames;

/// Locks, also after another thread has panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `tcp://` endpoint, IPv6 in brackets.
pub(crate) fn endpoint(ip: &str, port: impl std::fmt::Display) -> String {
    if ip.contains(':') { format!("tcp://[{ip}]:{port}") } else { format!("tcp://{ip}:{port}") }
}

/// A context whose threads carry libzmq's own names. Debian's build of the library does not set them, the one that
/// `PyZMQ` brings along does: an engine's control traffic runs in threads called `ZMQbg/IO/0`.
///
/// # Errors
/// When no socket can be made.
pub(crate) fn context() -> Result<zmq::Context> {
    let before = threads();
    let context = zmq::Context::new();
    // The first socket starts the threads: the reaper, then the I/O thread.
    drop(context.socket(zmq::PAIR)?);
    let mut new: Vec<u32> = threads().into_iter().filter(|tid| !before.contains(tid)).collect();
    new.sort_unstable();
    for (tid, name) in new.into_iter().zip(["ZMQbg/Reaper", "ZMQbg/IO/0"]) {
        // A name is not worth failing for.
        let _ = std::fs::write(format!("/proc/self/task/{tid}/comm"), name);
    }
    Ok(context)
}

fn threads() -> Vec<u32> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect()
}

/// Binds the PULL socket of a rank to a port of the system's choice and returns it with that port.
///
/// # Errors
/// When the address cannot be bound.
pub(crate) fn bind_pull(context: &zmq::Context, bind: IpAddr) -> Result<(zmq::Socket, u16)> {
    let socket = context.socket(zmq::PULL)?;
    socket.set_ipv6(bind.is_ipv6())?;
    socket.set_rcvhwm(0)?;
    let wanted = endpoint(&bind.to_string(), "*");
    socket.bind(&wanted).with_context(|| format!("bind the rank's PULL socket to {wanted}"))?;
    let bound = socket.get_last_endpoint()?.map_err(|_| anyhow::anyhow!("libzmq names no endpoint"))?;
    let port = bound.rsplit(':').next().and_then(|port| port.parse().ok());
    Ok((socket, port.with_context(|| format!("no port in {bound}"))?))
}

/// Has the kernel drop every segment that comes in over the connections which this process has accepted on `port`: what
/// is sent to it is never acknowledged. The sockets are libzmq's own, so they are found by their port.
///
/// # Errors
/// When a filter cannot be attached, or there is no such connection.
pub(crate) fn drop_all(port: u16) -> Result<()> {
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    let own = pidfd_open(getpid(), PidfdFlags::empty())?;
    let numbers: Vec<i32> = std::fs::read_dir("/proc/self/fd")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    let mut dropped = 0;
    for number in numbers {
        let Ok(copy) = pidfd_getfd(&own, number, PidfdGetfdFlags::empty()) else { continue };
        let socket = socket2::SockRef::from(&copy);
        let address = |of: std::io::Result<socket2::SockAddr>| of.ok().and_then(|of| of.as_socket());
        if address(socket.local_addr()).is_some_and(|at| at.port() == port)
            && address(socket.peer_addr()).is_some()
        {
            // `ret #0`: keep no byte of the packet, which is to drop it.
            socket.attach_filter(&[socket2::SockFilter::new(0x06, 0, 0, 0)])?;
            dropped += 1;
        }
    }
    anyhow::ensure!(dropped > 0, "nobody is connected to port {port}");
    Ok(())
}

/// Whose PUSH sockets: the options differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Prefill to decode: never reconnects, a monitor tells of the end, the socket is then made anew.
    Prefill,
    /// Decode to prefill: reconnects, gives up a send after a second.
    Decode,
}

/// One connection out.
struct Peer {
    push: zmq::Socket,
    monitor: Option<zmq::Socket>,
}

/// The PUSH sockets of a rank by endpoint, all on one context.
pub(crate) struct Outbox {
    side: Side,
    context: zmq::Context,
    peers: Mutex<HashMap<String, Arc<Mutex<Peer>>>>,
    opened: AtomicUsize,
}

impl Outbox {
    /// None is opened yet.
    ///
    /// # Errors
    /// When libzmq gives no context.
    pub(crate) fn new(side: Side) -> Result<Self> {
        Ok(Self { side, context: context()?, peers: Mutex::new(HashMap::new()), opened: AtomicUsize::new(0) })
    }

    /// Hands a message to libzmq, opening the connection first if need be.
    ///
    /// # Errors
    /// When libzmq takes nothing for this peer within the send time-out. A peer that refuses the connection is no
    /// error: libzmq takes up to 1000 messages for it, and without reconnecting they are lost silently.
    pub(crate) fn send(&self, ip: &str, port: u16, frames: Frames) -> Result<()> {
        self.send_all(ip, port, [frames])
    }

    /// Hands several messages to libzmq back to back; its I/O thread puts what it finds into one call.
    ///
    /// # Errors
    /// As [`Outbox::send`].
    pub(crate) fn send_all(
        &self,
        ip: &str,
        port: u16,
        messages: impl IntoIterator<Item = Frames>,
    ) -> Result<()> {
        let endpoint = endpoint(ip, port);
        let peer = self.peer(&endpoint)?;
        let peer = lock(&peer);
        for frames in messages {
            peer.push.send_multipart(frames, 0).with_context(|| format!("send to {endpoint}"))?;
        }
        Ok(())
    }

    fn peer(&self, endpoint: &str) -> Result<Arc<Mutex<Peer>>> {
        let mut peers = lock(&self.peers);
        if let Some(peer) = peers.get(endpoint)
            && !lock(peer).disconnected()
        {
            return Ok(Arc::clone(peer));
        }
        let peer = Arc::new(Mutex::new(self.open(endpoint)?));
        peers.insert(endpoint.to_owned(), Arc::clone(&peer));
        Ok(peer)
    }

    fn open(&self, endpoint: &str) -> Result<Peer> {
        let prefill = self.side == Side::Prefill;
        let push = self.context.socket(zmq::PUSH)?;
        push.set_ipv6(endpoint.contains('['))?;
        push.set_linger(0)?;
        push.set_sndtimeo(if prefill { 30_000 } else { 1_000 })?;
        let mut monitor = None;
        if prefill {
            push.set_reconnect_ivl(-1)?;
            push.set_tcp_keepalive(1)?;
            push.set_tcp_keepalive_idle(30)?;
            push.set_tcp_keepalive_intvl(5)?;
            push.set_tcp_keepalive_cnt(3)?;
        }
        push.connect(endpoint).with_context(|| format!("connect to {endpoint}"))?;
        if prefill {
            let name = format!("inproc://monitor-{}", self.opened.fetch_add(1, Ordering::Relaxed));
            push.monitor(&name, zmq::SocketEvent::DISCONNECTED.to_raw().into())?;
            let pair = self.context.socket(zmq::PAIR)?;
            pair.connect(&name)?;
            monitor = Some(pair);
        }
        Ok(Peer { push, monitor })
    }
}

impl Peer {
    fn disconnected(&self) -> bool {
        self.monitor.as_ref().is_some_and(|monitor| monitor.recv_multipart(zmq::DONTWAIT).is_ok())
    }
}
