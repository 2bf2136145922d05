//! Reads the RDMA ports of this host, over and over, on a thread of its own: byte and error counters of whole ports, as the kernel shows
//! them in files (`Documentation/ABI/stable/sysfs-class-infiniband`).
//!
//! May block for as long as a card's driver does: then nothing is read. A reading that took too long counts as none, since what it read
//! may be of any moment in between. A counter that goes back, stands at the end of 32 bits (older cards count no further), or is not
//! there, says nothing; the reading after it counts from itself.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::model::{Fault, MAX_PORTS, Of, Reading, What};
use crate::event::{Mono, SECOND};
use crate::gpu::windows::Link;
use crate::gpu::{Count, Counters, Pace, Told, Width};
use crate::kernel::monotonic;

/// Readings that wait at most: more than all ports give in ten seconds.
const READINGS: usize = 4096;

/// A reading of a port's two counters that takes longer has told nothing.
const DEADLINE: u64 = SECOND / 2;

/// How often it is looked which ports there are, and how often a port's state and errors are read.
const LOOK: u64 = 10 * SECOND;
const HEALTH: u64 = SECOND;

/// Bytes in one unit of `port_xmit_data` and `port_rcv_data` ("divided by 4", as the kernel's page has it).
const UNIT: u64 = 4;

/// A port whose rate is not told is taken for the fastest there is, bytes per second (XDR on 8 lanes).
const FASTEST: u64 = 200_000_000_000;

/// Longest file that is a number, a state or a rate.
const LONGEST: u64 = 128;

/// What to read and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where the kernel lists RDMA cards.
    pub root: PathBuf,
    /// Between two readings while no room is in transfer.
    pub idle: Duration,
    /// The same while one is.
    pub busy: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        let (idle, busy) = (Duration::from_secs(1), Duration::from_millis(125));
        Self { root: "/sys/class/infiniband".into(), idle, busy }
    }
}

/// How one port's readings stand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortStanding {
    /// Its link is up.
    pub active: bool,
    /// As the kernel tells it: `100 Gb/sec (4X EDR)`.
    pub rate: String,
    /// Readings asked for.
    pub reads: u64,
    /// Those that took longer than they may.
    pub late: u64,
    /// Those that failed.
    pub refused: u64,
    /// Why the last one failed; `None`: it did not.
    pub why: Option<String>,
    /// Readings that tell nothing: a counter went back, further than the link can move, or stands at the end of 32 bits.
    pub nonsense: u64,
    /// Time in readings.
    pub spent: Duration,
}

/// How everything stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Why no ports are known; `None`: some are, or it was not looked yet.
    pub absent: Option<String>,
    /// Ports that were ever there.
    pub ports: BTreeMap<String, PortStanding>,
    /// Ports beyond the bound.
    pub left_out: u64,
    /// Readings that found no place on their way.
    pub held: u64,
    /// The port that is being read, and since when.
    pub in_call: Option<(String, Mono)>,
}

/// The thread, and what it reads. Dropping it ends the thread, unless a driver holds it.
#[derive(Debug)]
pub struct PortReaders {
    readings: Receiver<Reading>,
    shared: Arc<Mutex<Standing>>,
    pace: Arc<Pace>,
}

impl PortReaders {
    /// Starts reading. Needs no privilege: the files are everybody's.
    ///
    /// # Errors
    ///
    /// That of starting a thread.
    pub fn start(settings: &Settings) -> io::Result<Self> {
        let (send, readings) = mpsc::sync_channel(READINGS);
        let (shared, pace) = (Arc::<Mutex<Standing>>::default(), Arc::<Pace>::default());
        let mut reader = Reader::new(settings.root.clone(), Arc::clone(&shared));
        let (settings, own) = (settings.clone(), Arc::clone(&pace));
        let thread = thread::Builder::new().name("roomtrace-rdma".to_owned()).spawn(move || {
            let mut listens = true;
            while listens && !own.stopped() {
                let began = Instant::now();
                reader.turn(&mut |reading| hand_on(&send, reading, &mut listens));
                own.sleep(began, |busy| if busy { settings.busy } else { settings.idle });
            }
        })?;
        pace.add(thread.thread());
        Ok(Self { readings, shared, pace })
    }

    /// What was read since the last call, in order for each port.
    pub fn readings(&self) -> impl Iterator<Item = Reading> + '_ {
        self.readings.try_iter()
    }

    /// Whether any room is in transfer: then readings are closer together.
    pub fn set_busy(&self, busy: bool) {
        self.pace.set_busy(busy.into());
    }

    /// How the work stands.
    pub fn standing(&self) -> Standing {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for PortReaders {
    fn drop(&mut self) {
        self.pace.end();
    }
}

/// All ports, and how they stand.
struct Reader {
    root: PathBuf,
    shared: Arc<Mutex<Standing>>,
    looked: Option<Mono>,
    ports: BTreeMap<String, Port>,
}

impl Reader {
    fn new(root: PathBuf, shared: Arc<Mutex<Standing>>) -> Self {
        Self { root, shared, looked: None, ports: BTreeMap::new() }
    }

    /// Reads what is due. What it finds goes to `out`; a reading that finds no place there is counted.
    fn turn(&mut self, out: &mut dyn FnMut(Reading) -> bool) {
        let now = monotonic();
        if self.looked.is_none_or(|at| now.since(at) >= LOOK) {
            self.looked = Some(now);
            self.look();
        }
        let Self { ports, shared, .. } = self;
        let all = |change: &mut dyn FnMut(&mut Standing)| {
            change(&mut shared.lock().unwrap_or_else(PoisonError::into_inner));
        };
        for (name, port) in ports {
            let before = monotonic();
            all(&mut |s| s.in_call = Some((name.clone(), before)));
            let mut held = 0;
            port.turn(&mut |at, what| {
                held += u64::from(!out(Reading { at, of: Of::Port(name.as_str().into()), what }));
            });
            port.standing.spent += Duration::from_nanos(monotonic().since(before));
            all(&mut |s| {
                s.in_call = None;
                s.held += held;
                s.ports.insert(name.clone(), port.standing.clone());
            });
        }
    }

    /// Looks which ports there are. One that is gone stays known: it is not read, and that is said.
    fn look(&mut self) {
        let found = list(&self.root);
        let mut left_out = 0;
        let absent = match found {
            Ok(found) => {
                for (name, directory) in found {
                    if self.ports.len() >= MAX_PORTS && !self.ports.contains_key(&name) {
                        left_out += 1;
                    } else {
                        self.ports.entry(name).or_insert_with(|| Port::new(directory));
                    }
                }
                self.ports.is_empty().then(|| format!("there is no RDMA card in {}", self.root.display()))
            }
            Err(error) => Some(format!("{}: {error}", self.root.display())),
        };
        let mut s = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        (s.absent, s.left_out) = (absent, left_out);
    }
}

/// Hands a reading on, if there is a place for it; `false` in `listens`: nobody takes any more.
fn hand_on(to: &SyncSender<Reading>, reading: Reading, listens: &mut bool) -> bool {
    match to.try_send(reading) {
        Ok(()) => true,
        Err(TrySendError::Full(_)) => false,
        Err(TrySendError::Disconnected(_)) => {
            *listens = false;
            true
        }
    }
}

/// Ports below `root` with their directories: `mlx5_0/1`.
fn list(root: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut all = Vec::new();
    for device in names(root)? {
        let ports = root.join(&device).join("ports");
        // A card that is going away has none.
        for port in names(&ports).unwrap_or_default() {
            all.push((format!("{device}/{port}"), ports.join(port)));
        }
    }
    Ok(all)
}

/// Names in a directory, in order, as far as they can be a device's or a port's.
fn names(directory: &Path) -> io::Result<Vec<String>> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let mut all = Vec::new();
    for entry in std::fs::read_dir(directory)?.take(4 * MAX_PORTS) {
        let name = entry?.file_name().into_string().unwrap_or_default();
        if !name.starts_with('.') && name.len() <= 64 && name.chars().all(plain) {
            all.push(name);
        }
    }
    all.sort_unstable();
    Ok(all)
}

/// One port.
struct Port {
    directory: PathBuf,
    counters: Counters,
    health_at: Option<Mono>,
    /// Kinds of errors that it counts, with the last reading.
    faults: BTreeMap<Fault, (Mono, u64)>,
    standing: PortStanding,
}

impl Port {
    fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            counters: Counters::new(Link::Rdma, UNIT, FASTEST),
            health_at: None,
            faults: BTreeMap::new(),
            standing: PortStanding::default(),
        }
    }

    fn turn(&mut self, out: &mut dyn FnMut(Mono, What)) {
        let now = monotonic();
        if self.health_at.is_none_or(|at| now.since(at) >= HEALTH) {
            self.health_at = Some(now);
            self.health(out);
        }
        if !self.standing.active {
            self.counters.forget();
            return;
        }
        let before = monotonic();
        let told = self
            .number("counters", "port_xmit_data")
            .and_then(|sent| Ok([sent, self.number("counters", "port_rcv_data")?]));
        let after = monotonic();
        self.standing.reads += 1;
        self.moved(before, after, told, out);
    }

    fn moved(
        &mut self,
        before: Mono,
        after: Mono,
        told: io::Result<[u64; 2]>,
        out: &mut dyn FnMut(Mono, What),
    ) {
        let told = match told {
            Ok(told) => told,
            Err(error) => {
                self.standing.refused += 1;
                self.standing.why = Some(error.to_string());
                return self.counters.forget();
            }
        };
        self.standing.why = None;
        if after.since(before) > DEADLINE {
            self.standing.late += 1;
            return self.counters.forget();
        }
        if told.contains(&u64::from(u32::MAX)) {
            self.standing.nonsense += 1;
            return self.counters.forget();
        }
        let told = told.map(|value| Told { count: Count { value, width: Width::Bits64 }, taken: 0 });
        match self.counters.next(before, after, told) {
            None => {}
            Some(Ok(stretch)) => out(after, What::Moved(stretch)),
            Some(Err(_)) => self.standing.nonsense += 1,
        }
    }

    /// Reads whether the link is up, how fast it is, and its errors.
    fn health(&mut self, out: &mut dyn FnMut(Mono, What)) {
        let state = self.text("", "state").unwrap_or_default();
        let was = std::mem::replace(&mut self.standing.active, state.starts_with("4:"));
        let rate = self.text("", "rate").unwrap_or_default();
        if rate != self.standing.rate || was != self.standing.active {
            self.counters = Counters::new(Link::Rdma, UNIT, bytes_per_second(&rate).unwrap_or(FASTEST));
            self.standing.rate = rate;
        }
        for fault in Fault::ALL {
            let Ok(count) = self.number(fault.directory(), fault.label()) else {
                self.faults.remove(&fault);
                continue;
            };
            let now = monotonic();
            if let Some((from, before)) = self.faults.insert(fault, (now, count))
                && count > before
            {
                out(now, What::Faults(from, fault, count - before));
            }
        }
    }

    fn number(&self, directory: &str, name: &str) -> io::Result<u64> {
        let text = self.text(directory, name)?;
        text.parse().map_err(|_| io::Error::other(format!("{name} is no number")))
    }

    fn text(&self, directory: &str, name: &str) -> io::Result<String> {
        let mut text = String::new();
        let file = File::open(self.directory.join(directory).join(name));
        let file = file.map_err(|error| io::Error::new(error.kind(), format!("{name}: {error}")))?;
        file.take(LONGEST).read_to_string(&mut text)?;
        Ok(text.trim().to_owned())
    }
}

/// The rate of a port, `2.5 Gb/sec (1X SDR)`, rounded up.
fn bytes_per_second(rate: &str) -> Option<u64> {
    let (number, unit) = rate.split_once(' ')?;
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let gigabits = whole.parse::<u64>().ok()?.checked_add(u64::from(part.bytes().any(|b| b != b'0')))?;
    let right = unit.starts_with("Gb/sec") && (1..=10_000).contains(&gigabits);
    right.then(|| gigabits * 1_000_000_000 / 8)
}

/// Looks once at which ports there are and whether they are read, for `doctor`. Comes back within `limit`, whatever a driver does.
pub fn look_once(settings: &Settings, limit: Duration) -> Standing {
    let shared = Arc::<Mutex<Standing>>::default();
    let (done, ended) = mpsc::sync_channel::<()>(1);
    let mut reader = Reader::new(settings.root.clone(), Arc::clone(&shared));
    let started = thread::Builder::new().name("roomtrace-rdma".to_owned()).spawn(move || {
        let _done = done;
        reader.turn(&mut |_| true);
    });
    match started {
        // Ends when the sender is dropped, or at the limit.
        Ok(_) => drop(ended.recv_timeout(limit)),
        Err(error) => {
            let why = format!("no thread could be started to read the ports: {error}");
            shared.lock().unwrap_or_else(PoisonError::into_inner).absent = Some(why);
        }
    }
    shared.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    /// A port in a tree that a test writes.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            for directory in ["counters", "hw_counters"] {
                std::fs::create_dir_all(tree.port().join(directory)).unwrap();
            }
            tree.put("state", "4: ACTIVE\n").put("rate", "100 Gb/sec (4X EDR)\n");
            tree
        }

        fn port(&self) -> PathBuf {
            self.0.path().join("mlx5_0/ports/1")
        }

        fn put(&self, name: &str, text: &str) -> &Self {
            std::fs::write(self.port().join(name), text).unwrap();
            self
        }

        fn counts(&self, sent: u64, received: u64) {
            self.put("counters/port_xmit_data", &format!("{sent}\n"));
            self.put("counters/port_rcv_data", &format!("{received}\n"));
        }

        fn reader(&self) -> Reader {
            Reader::new(self.0.path().to_owned(), Arc::default())
        }
    }

    /// Bytes that the reader finds in one turn, out and in.
    fn turn(reader: &mut Reader) -> Option<(u64, u64)> {
        let mut found = None;
        reader.turn(&mut |reading| {
            assert_eq!(reading.of, Of::Port("mlx5_0/1".into()));
            if let What::Moved(moved) = reading.what {
                found = Some((moved.out, moved.into));
            }
            true
        });
        found
    }

    fn standing(reader: &Reader) -> PortStanding {
        reader.shared.lock().unwrap().ports.values().next().unwrap().clone()
    }

    #[test]
    fn a_unit_is_four_bytes_and_the_first_reading_is_where_it_counts_from() {
        let tree = Tree::new();
        tree.counts(1 << 40, 5);
        let mut reader = tree.reader();
        assert_eq!(turn(&mut reader), None);
        tree.counts((1 << 40) + 250, 8);
        assert_eq!(turn(&mut reader), Some((1000, 12)));
        assert_eq!(turn(&mut reader), Some((0, 0)), "nothing moved, which was read");
        assert!(standing(&reader).active && standing(&reader).reads == 3);
    }

    #[test]
    fn a_counter_that_went_round_or_stands_at_its_end_says_nothing() {
        let tree = Tree::new();
        let mut reader = tree.reader();
        tree.counts(0xffff_fff0, 0);
        assert_eq!(turn(&mut reader), None);
        tree.counts(0x10, 0);
        assert_eq!(turn(&mut reader), None, "it may have gone round, or begun anew");
        tree.counts(0x11, 0);
        assert_eq!(turn(&mut reader), Some((4, 0)));
        for _ in 0..2 {
            tree.counts(0xffff_ffff, 0);
            assert_eq!(turn(&mut reader), None, "a card that counts no further");
        }
        tree.counts(0x11, 0);
        assert_eq!(turn(&mut reader), None, "counts from here again");
        tree.counts(1 << 60, 0);
        assert_eq!(turn(&mut reader), None, "no link is as fast");
        assert_eq!(standing(&reader).nonsense, 4);
    }

    #[test]
    fn a_port_that_is_down_or_gone_is_not_measured() {
        let tree = Tree::new();
        let mut reader = tree.reader();
        tree.counts(1, 1);
        assert_eq!(turn(&mut reader), None);
        std::fs::remove_file(tree.port().join("counters/port_rcv_data")).unwrap();
        assert_eq!(turn(&mut reader), None);
        assert!(standing(&reader).why.unwrap().contains("port_rcv_data"));
        tree.counts(3, 3);
        assert_eq!(turn(&mut reader), None, "what passed meanwhile is not known");
        tree.put("state", "1: DOWN\n");
        let health = |reader: &mut Reader| reader.ports.values_mut().for_each(|p| p.health_at = None);
        health(&mut reader);
        assert_eq!((turn(&mut reader), standing(&reader).active), (None, false));
        tree.put("state", "4: ACTIVE\n").counts(9, 9);
        health(&mut reader);
        assert_eq!((turn(&mut reader), turn(&mut reader)), (None, Some((0, 0))));
        std::fs::remove_dir_all(tree.0.path().join("mlx5_0")).unwrap();
        health(&mut reader);
        assert_eq!((turn(&mut reader), standing(&reader).active), (None, false));
    }

    #[test]
    fn errors_are_told_when_they_grow() {
        let tree = Tree::new();
        tree.counts(1, 1);
        tree.put("hw_counters/local_ack_timeout_err", "7\n").put("counters/link_downed", "1\n");
        let mut reader = tree.reader();
        turn(&mut reader);
        tree.put("hw_counters/local_ack_timeout_err", "9\n");
        reader.ports.values_mut().for_each(|p| p.health_at = None);
        let mut found = Vec::new();
        reader.turn(&mut |reading| {
            if let What::Faults(_, fault, count) = reading.what {
                found.push((fault, count));
            }
            true
        });
        assert_eq!(found, [(Fault::AckTimeout, 2)]);
    }

    #[test]
    fn nothing_there_is_said_and_no_fault() {
        let dir = tempfile::tempdir().unwrap();
        let looked = |root: &Path| {
            let settings = Settings { root: root.to_owned(), ..Settings::default() };
            look_once(&settings, Duration::from_secs(20)).absent.unwrap()
        };
        assert!(looked(dir.path()).contains("no RDMA card"));
        assert!(looked(&dir.path().join("none")).contains("No such file"));
    }

    #[test]
    fn a_rate_is_rounded_up_and_nonsense_is_none() {
        assert_eq!(bytes_per_second("100 Gb/sec (4X EDR)"), Some(12_500_000_000));
        assert_eq!(bytes_per_second("2.5 Gb/sec (1X SDR)"), Some(375_000_000));
        for none in ["", "100", "100 Mb/sec", "-1 Gb/sec", "0 Gb/sec", "99999999999999999999 Gb/sec"] {
            assert_eq!(bytes_per_second(none), None, "{none}");
        }
    }
}
