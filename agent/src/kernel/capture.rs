//! A running capture: the loaded programs, the ring, and the maps through which the agent answers.
//!
//! One thread owns it. It never blocks except in [`Capture::wait`].

use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, RingBuf};
use aya::{Btf, Ebpf};
use roomtrace_common::{
    Endpoint, PREFIXES, Prefix, SAMPLE_EVERY, Settings, counter, judgement, program, reason, state,
};

use super::ask::Ask;
use super::error::{KernelError, not_built};
use super::extra::{self, MissingProgram};
use super::hook::{Hook, RefusedHook};
use super::object::{self, chain, map};
use super::ring::{Costs, Plain};
use super::{offsets, record, sys};
use crate::event::{Event, NotCaptured, SocketId};

/// What to capture and how much of it.
#[derive(Clone, Debug)]
pub struct CaptureConfig {
    /// Use this back end and no other; `None`: the first that works.
    pub hook: Option<Hook>,
    /// Processes whose main thread's name (or whose calling thread's name) begins with one of these are engine
    /// processes: at most 8, each 1 to 15 bytes. `SGLang` names its scheduler processes `sglang::schedul…`.
    pub engine_comms: Vec<String>,
    /// Connections with one of these ports at either end, and listeners on them, are followed whoever owns
    /// them: at most 64.
    pub ports: Vec<u16>,
    /// Connect attempts to these endpoints are reported whoever makes them.
    pub endpoints: Vec<SocketAddr>,
    /// Size of the ring: a power of two from 64 KiB to 1 GiB. 8 MiB hold about 30 000 small messages.
    pub ring_bytes: u32,
    /// How many bytes of a connection that was open at start, or that an engine process opens and that does
    /// not begin with a ZMTP greeting, are shipped before user space has judged it.
    pub found_budget: u32,
    /// How many bytes of any other new connection may pass unread (by `io_uring`, `sendfile`, …) before it is
    /// forgotten; one that begins with other bytes than a ZMTP greeting is forgotten at once. Also how much is shipped
    /// of an engine process's connection that begins neither as ZMTP nor as HTTP/1 does, so that it can be named.
    pub fresh_budget: u32,
    /// Whether HTTP of engine processes is followed: begin and end of requests and answers, never more than 1024 bytes
    /// of each end of a longer call. Off: such connections are forgotten like any other.
    pub requests: bool,
    /// Whether connections of engine processes that carry neither ZMTP nor HTTP are remembered for what they carry
    /// ([`Capture::ask_carried`], and once at their end). Off: such connections are forgotten like any other.
    pub carriers: bool,
    /// Number of the one network namespace whose sockets' events are handed on; `None`: those of all.
    pub namespace: Option<u32>,
}

impl Default for CaptureConfig {
    fn default() -> Self {
        Self {
            hook: None,
            engine_comms: vec!["sglang::".to_owned()],
            ports: Vec::new(),
            endpoints: Vec::new(),
            ring_bytes: 8 << 20,
            found_budget: 1 << 20,
            fresh_budget: 4096,
            requests: true,
            carriers: true,
            namespace: None,
        }
    }
}

/// What user space found a pending socket to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// It carries ZMTP that matters: ship it without limit.
    Follow,
    /// It carries HTTP that matters: ship its ends.
    Http,
    /// It carries something else: the kernel forgets it, or counts what it carries where it is not taken for HTTP.
    Foreign,
    /// It carries neither ZMTP nor HTTP, also where it is taken for HTTP: the kernel counts what it carries, if it belongs to an engine.
    Neither,
}

/// Events that did not come, by reason; each grows only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Records written into the ring.
    pub records: u64,
    /// Records that the full ring refused. Bytes lost this way show as holes in their stream.
    pub ring_full: u64,
    /// Sockets that the kernel could not remember for want of memory: not followed.
    pub storage_refused: u64,
    /// Runs that were left out because the same program was already running on that CPU.
    pub recursion: u64,
    /// Sockets muted because they spoke something else than ZMTP, or by a judgement.
    pub foreign: u64,
    /// Sockets muted because nothing readable came within their budget.
    pub muted: u64,
    /// MPTCP connections established on this host: their bytes are not visible.
    pub mptcp: u64,
    /// Records that user space could not read (never, unless object and agent differ).
    pub malformed: u64,
    /// Endpoints that could not be watched because the table was full.
    pub endpoints_refused: u64,
    /// Retransmissions of watched sockets without an event of their own: within 100 ms of the one before.
    pub retransmissions_merged: u64,
    /// Processes that could not be watched because the table was full.
    pub processes_refused: u64,
    /// Calls on watched sockets whose bytes, or those between their ends, were not captured, by reason. Calls of a
    /// streamed HTTP answer that are not even seen by length are in none.
    pub not_captured: Vec<(NotCaptured, u64)>,
}

/// Watched sockets by what they are now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketCounts {
    /// Listeners of watched processes and ports.
    pub listening: u64,
    /// Connect attempts under way.
    pub connecting: u64,
    /// Not judged yet (this includes every connection of the host that was established and is still silent).
    pub pending: u64,
    /// Followed as ZMTP.
    pub zmtp: u64,
    /// Followed as HTTP.
    pub http: u64,
    /// Not followed but remembered for what they carry.
    pub carriers: u64,
}

/// What one program has cost so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProgramCost {
    /// Its name in the kernel.
    pub name: &'static str,
    /// How often it ran.
    pub runs: u64,
    /// Time of the runs that were timed (about one in 128).
    pub sampled_seconds: f64,
    /// How many were timed. `sampled_seconds / samples * runs` estimates the whole.
    pub samples: u64,
}

/// A running capture. Dropping it detaches everything; so does the kernel when the process dies.
pub struct Capture {
    hook: Hook,
    refused: Vec<RefusedHook>,
    missing: Vec<MissingProgram>,
    ebpf: Ebpf,
    ring: RingBuf<MapData>,
    epoll: OwnedFd,
    judgements: HashMap<MapData, u64, u32>,
    endpoints: HashMap<MapData, Plain<Endpoint>, u32>,
    ask: Ask,
    processes: HashMap<MapData, u32, u32>,
    counters: PerCpuArray<MapData, u64>,
    costs: Array<MapData, Plain<Costs>>,
    /// Records handed over so far.
    taken: u64,
    malformed: u64,
    endpoints_refused: u64,
    processes_refused: u64,
    /// [`CaptureConfig::namespace`].
    namespace: Option<u32>,
}

impl std::fmt::Debug for Capture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Capture").field("hook", &self.hook).finish_non_exhaustive()
    }
}

impl Capture {
    /// Loads the programs with the first back end that works, attaches them, and lists the sockets that are
    /// already open (their events wait in the ring).
    ///
    /// # Errors
    ///
    /// Each names what the operator can do; see [`KernelError`].
    pub fn start(config: &CaptureConfig) -> Result<Self, KernelError> {
        let settings = settings(config)?;
        sys::bpf_reachable().map_err(|source| KernelError::NoBpf { source })?;
        super::preflight::may_use_bpf()?;
        let kernel = offsets::kernel_types()?;
        let settings = Settings {
            at: offsets::resolve(&kernel)?,
            calls: offsets::calls(),
            group_dead: u32::from(offsets::group_dead(&kernel)),
            ..settings
        };
        drop(kernel); // megabytes
        let types = object::aya_types()?;
        let (hook, refused, mut ebpf) = choose(config, &settings, &types)?;
        object::load_walks(&mut ebpf, &types)?;
        let missing = extra::attach(&mut ebpf, &types);
        drop(types); // megabytes, and all programs are loaded
        let mut capture = Self::around(hook, refused, missing, ebpf)?;
        capture.namespace = config.namespace;
        let failed = |why| KernelError::Map { map: map::PORTS, action: "fill", why };
        let ports = capture.ebpf.map_mut(map::PORTS).ok_or_else(|| failed("no such map".to_owned()))?;
        let mut ports: HashMap<_, u16, u32> = ports.try_into().map_err(|e: MapError| failed(chain(&e)))?;
        for port in &config.ports {
            ports.insert(port, 1, 0).map_err(|e| failed(chain(&e)))?;
        }
        for endpoint in &config.endpoints {
            capture.watch_endpoint(*endpoint)?;
        }
        object::walk(&mut capture.ebpf, object::SEARCH)?;
        Ok(capture)
    }

    fn around(
        hook: Hook,
        refused: Vec<RefusedHook>,
        missing: Vec<MissingProgram>,
        mut ebpf: Ebpf,
    ) -> Result<Self, KernelError> {
        let ring = take(&mut ebpf, map::EVENTS)?;
        let ring = RingBuf::try_from(ring).map_err(|e| unusable(map::EVENTS, &e))?;
        let epoll = sys::epoll_on(ring.as_fd()).map_err(|source| KernelError::Wait { source })?;
        Ok(Self {
            hook,
            refused,
            missing,
            ring,
            epoll,
            judgements: typed(&mut ebpf, map::JUDGEMENTS)?,
            endpoints: typed(&mut ebpf, map::ENDPOINTS)?,
            ask: Ask::new(typed(&mut ebpf, map::ASKED)?),
            processes: typed(&mut ebpf, map::PROCESSES)?,
            counters: typed(&mut ebpf, map::COUNTERS)?,
            costs: typed(&mut ebpf, map::COSTS)?,
            ebpf,
            taken: 0,
            malformed: 0,
            endpoints_refused: 0,
            processes_refused: 0,
            namespace: None,
        })
    }

    /// The back end in use.
    pub const fn hook(&self) -> Hook {
        self.hook
    }

    /// Back ends that were tried before it, with the reason why each was refused.
    pub fn refused(&self) -> &[RefusedHook] {
        &self.refused
    }

    /// Programs that this kernel does not take and that the capture does without, each with the reason.
    pub fn missing(&self) -> &[MissingProgram] {
        &self.missing
    }

    /// Waits until the ring is a quarter full or `timeout` has passed, whichever comes first; `true` for the
    /// former. Give about 10 ms, then [`drain`](Self::drain).
    ///
    /// # Errors
    ///
    /// [`KernelError::Wait`].
    pub fn wait(&self, timeout: Duration) -> Result<bool, KernelError> {
        sys::epoll_wait(&self.epoll, timeout).map_err(|source| KernelError::Wait { source })
    }

    /// Hands at most `budget` events to `sink` and returns how many records it took; fewer than `budget` means
    /// that the ring is empty. Events of one socket come in the order in which they were recorded. Nothing is
    /// allocated, and the bytes are borrowed from the ring.
    pub fn drain(&mut self, budget: usize, sink: &mut impl FnMut(Event<'_>)) -> usize {
        let (mut taken, asked) = (0, self.namespace);
        while taken < budget {
            let Some(item) = self.ring.next() else { break };
            match record::decode(&item) {
                Some(event) if elsewhere(asked, &event) => {}
                Some(event) => {
                    self.ask.note(&event);
                    sink(event);
                }
                None => self.malformed += 1,
            }
            taken += 1;
        }
        self.taken += taken as u64;
        taken
    }

    /// Hands on every event that has been recorded until now. A record that another CPU is still writing hides those behind
    /// it from [`drain`](Self::drain): this one waits for it, a second at most; `false`: in vain.
    ///
    /// # Errors
    ///
    /// [`KernelError::Map`] where the kernel refuses to say how many there are.
    pub fn drain_recorded(&mut self, sink: &mut impl FnMut(Event<'_>)) -> Result<bool, KernelError> {
        let recorded = self.counter(counter::RECORDS)?;
        let until = Instant::now() + Duration::from_secs(1);
        loop {
            let left = usize::try_from(recorded.saturating_sub(self.taken)).unwrap_or(usize::MAX);
            self.drain(left, sink);
            if self.taken >= recorded || Instant::now() >= until {
                return Ok(self.taken >= recorded);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Answers about a pending socket. The kernel looks at it at the socket's next call; for sockets judged by
    /// their greeting during their first 64 calls only, for other pending ones always, for HTTP ones at every call of
    /// which it tells. ([`Judgement::Http`] means [`Judgement::Foreign`] where `requests` is off.)
    ///
    /// # Errors
    ///
    /// [`KernelError::Map`] where the kernel refuses the update.
    pub fn judge(&mut self, socket: SocketId, answer: Judgement) -> Result<(), KernelError> {
        let value = match answer {
            Judgement::Follow => judgement::ZMTP,
            Judgement::Http => judgement::HTTP,
            Judgement::Foreign => judgement::FOREIGN,
            Judgement::Neither => judgement::NEITHER,
        };
        self.judgements.insert(socket.0, value, 0).map_err(|e| KernelError::Map {
            map: map::JUDGEMENTS,
            action: "update",
            why: chain(&e),
        })
    }

    /// From now on counts this process (host numbering), which is no engine process by its name, among the engine
    /// processes: its listeners and what they accept are followed, its threads' ends reported. `false`: the table (1024)
    /// is full; counted. Its sockets that are open already come with the next [`search`](Self::search).
    ///
    /// # Errors
    ///
    /// [`KernelError::Map`] where the kernel refuses the update for another reason.
    pub fn watch_process(&mut self, pid: u32) -> Result<bool, KernelError> {
        match self.processes.insert(pid, 1, 0) {
            Ok(()) => Ok(true),
            Err(e) if is_full(&e) => {
                self.processes_refused += 1;
                Ok(false)
            }
            Err(e) => Err(KernelError::Map { map: map::PROCESSES, action: "update", why: chain(&e) }),
        }
    }

    /// Counts it among them no longer. What it has open goes on being followed until it is closed.
    pub fn forget_process(&mut self, pid: u32) {
        // It may never have been there: nothing to tell.
        let _ = self.processes.remove(&pid);
    }

    /// Asks where these sockets (at most 64) stand: the answers ([`crate::event::What::Stand`]) are in the ring when this
    /// returns, unless it is full. Those that their process has closed, that the kernel has forgotten, or that come after the
    /// 64th give none. Costs a walk over the open files of the processes that earlier events of sockets named (of all, if
    /// there are more than 64 of them): about half a microsecond a file.
    ///
    /// # Errors
    ///
    /// [`KernelError::Search`], [`KernelError::Map`].
    pub fn ask(&mut self, sockets: &[SocketId]) -> Result<(), KernelError> {
        self.ask.ask(&mut self.ebpf, sockets)
    }

    /// Asks what every connection of an engine process has carried that is no control connection: the answers ([`Event::Carried`]) are
    /// in the ring when this returns, unless it is full. Those that no process holds open any more give none until their end, which
    /// is told without being asked for. Costs a walk as in [`Self::ask`].
    ///
    /// # Errors
    ///
    /// [`KernelError::Search`].
    pub fn ask_carried(&mut self) -> Result<(), KernelError> {
        self.ask.walk(&mut self.ebpf, object::CARRIED)
    }

    /// From now on reports connect attempts to this endpoint, with their result, whoever makes them. `false`:
    /// the table (4096) is full; counted.
    ///
    /// # Errors
    ///
    /// [`KernelError::Map`] where the kernel refuses the update for another reason.
    pub fn watch_endpoint(&mut self, endpoint: SocketAddr) -> Result<bool, KernelError> {
        match self.endpoints.insert(Plain(key(endpoint)), 1, 0) {
            Ok(()) => Ok(true),
            Err(e) if is_full(&e) => {
                self.endpoints_refused += 1;
                Ok(false)
            }
            Err(e) => Err(KernelError::Map { map: map::ENDPOINTS, action: "update", why: chain(&e) }),
        }
    }

    /// Reports connect attempts to this endpoint no longer (other than those of watched processes).
    pub fn forget_endpoint(&mut self, endpoint: SocketAddr) {
        // It may never have been there: nothing to tell.
        let _ = self.endpoints.remove(&Plain(key(endpoint)));
    }

    /// Lists the open sockets again, for engine processes that the first search came too early for (a process
    /// that took its name after it had opened its connections).
    ///
    /// # Errors
    ///
    /// [`KernelError::Search`].
    pub fn search(&mut self) -> Result<(), KernelError> {
        object::walk(&mut self.ebpf, object::SEARCH)
    }

    /// What was lost or turned away so far.
    ///
    /// # Errors
    ///
    /// [`KernelError::Map`] where the kernel refuses the look-up.
    pub fn counters(&self) -> Result<Counters, KernelError> {
        let not_captured = (1..=reason::MIDDLE)
            .filter_map(|n| record::reason_of(n).map(|why| (n, why)))
            .map(|(n, why)| Ok((why, self.counter(counter::NOT_CAPTURED + u32::from(n))?)))
            .collect::<Result<_, KernelError>>()?;
        Ok(Counters {
            records: self.counter(counter::RECORDS)?,
            ring_full: self.counter(counter::RING_FULL)?,
            storage_refused: self.counter(counter::STORAGE_REFUSED)?,
            recursion: self.recursion(),
            foreign: self.counter(counter::FOREIGN)?,
            muted: self.counter(counter::MUTED)?,
            mptcp: self.counter(counter::MPTCP)?,
            malformed: self.malformed,
            endpoints_refused: self.endpoints_refused,
            retransmissions_merged: self.counter(counter::RETRANSMISSIONS_MERGED)?,
            processes_refused: self.processes_refused,
            not_captured,
        })
    }

    /// Watched sockets by state.
    ///
    /// # Errors
    ///
    /// [`KernelError::Map`] where the kernel refuses the look-up.
    pub fn sockets(&self) -> Result<SocketCounts, KernelError> {
        let now = |state: u32| {
            let entered = self.counter(counter::ENTERED + state)?;
            Ok(entered.saturating_sub(self.counter(counter::LEFT + state)?))
        };
        Ok(SocketCounts {
            listening: now(state::LISTENING)?,
            connecting: now(state::CONNECTING)?,
            pending: now(state::PENDING)?,
            zmtp: now(state::ZMTP)?,
            http: now(state::HTTP)?,
            carriers: now(state::CARRIER)?,
        })
    }

    /// What each program has cost so far, by its own sampled clock.
    ///
    /// # Errors
    ///
    /// [`KernelError::Map`] where the kernel refuses the look-up.
    pub fn cost(&self) -> Result<[ProgramCost; program::COUNT], KernelError> {
        let costs = self.costs.get(&0, 0).map_err(|e| KernelError::Map {
            map: map::COSTS,
            action: "read",
            why: chain(&e),
        })?;
        let mut out =
            program::NAMES.map(|name| ProgramCost { name, runs: 0, sampled_seconds: 0.0, samples: 0 });
        for cpu in &costs.0 {
            for (sum, cost) in out.iter_mut().zip(cpu) {
                sum.runs += cost.runs;
                sum.samples += cost.sampled;
                sum.sampled_seconds += Duration::from_nanos(cost.nanos).as_secs_f64();
            }
        }
        Ok(out)
    }

    /// Gives up every capability of the calling thread but `CAP_BPF` and `CAP_PERFMON`, for good (threads that
    /// it starts later inherit that; call it before starting any). On kernels from 5.19 also those two, if
    /// `all`: map updates go on without, a second [`search`](Self::search) does not.
    ///
    /// # Errors
    ///
    /// [`KernelError::Privileges`].
    pub fn drop_privileges(&self, all: bool) -> Result<(), KernelError> {
        super::preflight::keep_only(all)
    }

    fn counter(&self, index: u32) -> Result<u64, KernelError> {
        let values = self.counters.get(&index, 0).map_err(|e| KernelError::Map {
            map: map::COUNTERS,
            action: "read",
            why: chain(&e),
        })?;
        Ok(values.iter().sum())
    }

    fn recursion(&self) -> u64 {
        let of = |p: &aya::programs::Program| {
            let fd = p.fd().ok()?;
            sys::recursion_misses(fd.as_fd()).ok()
        };
        self.ebpf.programs().filter_map(|(_, p)| of(p)).sum()
    }
}

/// The first back end that loads and attaches, and why those before it did not.
fn choose(
    config: &CaptureConfig,
    settings: &Settings,
    types: &Btf,
) -> Result<(Hook, Vec<RefusedHook>, Ebpf), KernelError> {
    let mut refused = Vec::new();
    for hook in Hook::ALL.into_iter().filter(|hook| config.hook.is_none_or(|forced| forced == *hook)) {
        if hook != Hook::Sock {
            refused.push(not_built(hook));
            continue;
        }
        let mut ebpf = object::open(settings, config.ring_bytes)?;
        match object::attach(&mut ebpf, hook, types) {
            Ok(()) => return Ok((hook, refused, ebpf)),
            Err(e) if e.is_about_hook() => refused.push(RefusedHook { hook, why: e.to_string() }),
            Err(e) => return Err(e),
        }
    }
    match (config.hook, refused.pop()) {
        (Some(_), Some(refused)) => Err(KernelError::ForcedHook { refused }),
        (_, last) => {
            refused.extend(last);
            Err(KernelError::NoHook { refused })
        }
    }
}

/// Whether an event is of another network namespace than the one that was asked for.
fn elsewhere(asked: Option<u32>, event: &Event<'_>) -> bool {
    matches!((asked, event), (Some(asked), Event::Socket(of)) if of.netns != asked)
}

fn settings(config: &CaptureConfig) -> Result<Settings, KernelError> {
    let refuse = |setting, why: String| Err(KernelError::Setting { setting, why });
    if !config.ring_bytes.is_power_of_two() || !(64 << 10..=1 << 30).contains(&config.ring_bytes) {
        return refuse(
            "ring_bytes",
            format!("{} is not a power of two from 65536 to 1073741824", config.ring_bytes),
        );
    }
    if config.ports.len() > 64 {
        return refuse("ports", format!("{} ports, at most 64 are possible", config.ports.len()));
    }
    if config.engine_comms.len() > PREFIXES {
        return refuse("engine_comms", format!("{} prefixes, at most {PREFIXES}", config.engine_comms.len()));
    }
    let mut out = Settings {
        wake_above: config.ring_bytes / 4,
        found_budget: config.found_budget,
        fresh_budget: config.fresh_budget,
        requests: u32::from(config.requests),
        carriers: u32::from(config.carriers),
        ..Settings::default()
    };
    for (slot, comm) in out.prefixes.iter_mut().zip(&config.engine_comms) {
        let Some(prefix) = prefix(comm) else {
            return refuse(
                "engine_comms",
                format!("`{comm}` must have 1 to 15 bytes, as a thread name does"),
            );
        };
        *slot = prefix;
        out.prefixes_used += 1;
    }
    Ok(out)
}

fn prefix(comm: &str) -> Option<Prefix> {
    let bytes = comm.as_bytes();
    if !(1..=15).contains(&bytes.len()) {
        return None;
    }
    let word = |of: &dyn Fn(usize) -> u8, at: usize| {
        let mut word = [0; 8];
        for (n, byte) in word.iter_mut().enumerate() {
            *byte = of(at + n);
        }
        u64::from_ne_bytes(word)
    };
    let value = |n: usize| bytes.get(n).copied().unwrap_or(0);
    let mask = |n: usize| if n < bytes.len() { 0xff } else { 0 };
    Some(Prefix { value: [word(&value, 0), word(&value, 8)], mask: [word(&mask, 0), word(&mask, 8)] })
}

/// Whether an update was refused because the table is full.
fn is_full(error: &MapError) -> bool {
    matches!(error, MapError::SyscallError(e) if e.io_error.raw_os_error() == Some(libc::E2BIG))
}

fn key(endpoint: SocketAddr) -> Endpoint {
    let address = match endpoint {
        SocketAddr::V4(v4) => v4.ip().to_ipv6_mapped().octets(),
        SocketAddr::V6(v6) => v6.ip().octets(),
    };
    Endpoint { address, port: endpoint.port(), pad: [0; 6] }
}

fn take(ebpf: &mut Ebpf, name: &'static str) -> Result<Map, KernelError> {
    ebpf.take_map(name).ok_or(KernelError::Object { why: format!("the object has no map `{name}`") })
}

fn typed<M: TryFrom<Map, Error = MapError>>(ebpf: &mut Ebpf, name: &'static str) -> Result<M, KernelError> {
    take(ebpf, name)?.try_into().map_err(|e| unusable(name, &e))
}

fn unusable(name: &'static str, error: &MapError) -> KernelError {
    KernelError::Object { why: format!("map `{name}`: {}", chain(error)) }
}

const _: () = assert!(SAMPLE_EVERY.is_power_of_two());
