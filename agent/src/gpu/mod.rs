//! What the GPUs of this host move and suffer, read from the driver's library (NVML).
//!
//! All of it is of whole devices: the driver has no record of one copy, and no reading of one process's bytes. One thread loads the
//! library and then waits for errors, one more per GPU asks for that GPU and reads it. A call may hang in the driver for ever: then that thread
//! hangs, its readings stop, and what was not read is not measured. Nobody waits for these threads, at the end neither. Readings go
//! over one bounded channel. `counter`, `quiet`, `windows` and `model` are pure; `driver` is the only file with unsafe code.

mod calls;
mod counter;
mod driver;
pub mod model;
pub mod quiet;
mod sampler;
mod standing;
pub mod windows;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

pub use calls::{Called, each_call};
pub use counter::{Count, Counters, Told, Unusable, Width, bytes_at, bytes_between, fastest_pcie};
pub use standing::{GpuStanding, Library, Standing};

use crate::event::Mono;
use crate::kernel::monotonic;
use driver::{Driver, Events, Gpu, TROUBLE, XID};
use model::{MAX_GPUS, Reading, What};
use sampler::Sampler;
use standing::Watched;
use windows::Source;

/// Readings that wait at most: more than all GPUs give in a second.
const READINGS: usize = 4096;

/// How often a library is looked for that was not there: drivers are installed while the agent runs.
const LOOK_AGAIN: Duration = Duration::from_mins(1);

/// How long one wait for an event takes, milliseconds.
const WAIT: u32 = 1000;

/// Events that come at once at most; then a pause, whatever the driver says.
const BURST: u32 = 64;

/// What to read and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The driver's library; `None`: where the loader finds it.
    pub lib_path: Option<PathBuf>,
    /// Between two readings of a GPU while no room is in transfer.
    pub idle: Duration,
    /// The same while one is. More than 100 ms, below which the driver's rates (GPM) are not refreshed.
    pub busy: Duration,
    /// `/proc`, or what stands for it.
    pub proc: String,
    /// Sources of bytes that are asked. All of them, unless they are to be compared: the surest that a GPU has hides the others.
    pub sources: &'static [Source],
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            lib_path: None,
            idle: Duration::from_secs(1),
            busy: Duration::from_millis(125),
            proc: "/proc".into(),
            sources: &[Source::Gpm, Source::Counters, Source::Throughput],
        }
    }
}

/// The threads, and what they read. Dropping it ends those that the driver lets go.
#[derive(Debug)]
pub struct Readers {
    readings: Receiver<Reading>,
    shared: Arc<Mutex<Standing>>,
    pace: Arc<Pace>,
}

/// What threads that read are to do.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// A bit for each of what is read.
    busy: AtomicU32,
    stop: AtomicBool,
    /// Threads that sleep between readings.
    sleepers: Mutex<Vec<Thread>>,
}

impl Pace {
    /// A thread that sleeps between readings.
    pub(crate) fn add(&self, sleeper: &Thread) {
        self.sleepers.lock().unwrap_or_else(PoisonError::into_inner).push(sleeper.clone());
    }

    /// What any room is in transfer at, a bit for each: there sleep is shorter.
    pub(crate) fn set_busy(&self, busy: u32) {
        if busy & !self.busy.swap(busy, Ordering::Relaxed) != 0 {
            self.wake();
        }
    }

    /// Sleeps until so long after `began` as `pause` says of now (whether anything is busy), or until there is no more to do.
    pub(crate) fn sleep(&self, began: Instant, pause: impl Fn(bool) -> Duration) {
        while !self.stopped() {
            let left = pause(self.busy.load(Ordering::Relaxed) != 0).saturating_sub(began.elapsed());
            if left.is_zero() {
                return;
            }
            thread::park_timeout(left);
        }
    }

    /// Sleeps until the moment that `due` says (whether this one is busy), or until there is no more to do.
    fn sleep_until(&self, index: u32, due: impl Fn(bool) -> Mono) {
        let bit = gpu_bit(index);
        while !self.stopped() {
            let left = due(self.busy.load(Ordering::Relaxed) & bit != 0).since(monotonic());
            if left == 0 {
                return;
            }
            thread::park_timeout(Duration::from_nanos(left));
        }
    }

    /// There is no more to do.
    pub(crate) fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// Whether there is not.
    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn wake(&self) {
        self.sleepers.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(Thread::unpark);
    }
}

/// The bit of a GPU in what [`Readers::set_busy`] takes.
pub const fn gpu_bit(index: u32) -> u32 {
    const { assert!(MAX_GPUS <= u32::BITS as usize) };
    1_u32.rotate_left(index)
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.pace.end();
    }
}

impl Readers {
    /// Starts reading. Threads inherit the privileges of the caller: none is needed but access to the driver's device files.
    ///
    /// # Errors
    ///
    /// That of starting a thread.
    pub fn start(settings: &Settings) -> std::io::Result<Self> {
        let (send, readings) = mpsc::sync_channel(READINGS);
        let (shared, pace) = (Arc::default(), Arc::<Pace>::default());
        let loader = Loader {
            settings: settings.clone(),
            watched: Watched::new(&shared, None),
            shared: Arc::clone(&shared),
            pace: Arc::clone(&pace),
            readings: send,
        };
        let thread = thread::Builder::new().name("roomtrace-gpu".to_owned()).spawn(move || loader.run())?;
        pace.add(thread.thread());
        Ok(Self { readings, shared, pace })
    }

    /// What was read since the last call, in order for each GPU.
    pub fn readings(&self) -> impl Iterator<Item = Reading> + '_ {
        self.readings.try_iter()
    }

    /// At which GPUs any room is in transfer ([`gpu_bit`] of each): readings of those are closer together.
    pub fn set_busy(&self, gpus: u32) {
        self.pace.set_busy(gpus);
    }

    /// How the work stands.
    pub fn standing(&self) -> Standing {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Loads the library, starts a thread per GPU, and waits for errors of all of them.
struct Loader {
    settings: Settings,
    watched: Watched,
    shared: Arc<Mutex<Standing>>,
    pace: Arc<Pace>,
    readings: SyncSender<Reading>,
}

impl Loader {
    fn run(self) {
        let Some((driver, count)) = self.load() else { return };
        let (found, gpus) = mpsc::channel();
        for index in 0..count {
            self.read(driver, index, found.clone());
        }
        drop(found);
        self.watch(driver, &gpus);
    }

    /// The driver and how many GPUs of it are read, once there is one; `None`: nobody wants to know any more.
    fn load(&self) -> Option<(Driver, u32)> {
        while !self.pace.stopped() {
            match look(&self.settings, &self.watched) {
                Ok(all) => return Some(all),
                Err(why) => {
                    let new = self.watched.all(|s| {
                        let absent = Library::Absent(why.clone());
                        std::mem::replace(&mut s.nvml, absent.clone()) != absent
                    });
                    if new {
                        tracing::info!("GPU copy activity is not measured: {why}");
                    }
                }
            }
            let looked = Instant::now();
            // Others are woken with it for other reasons.
            self.pace.sleep(looked, |_| LOOK_AGAIN);
        }
        None
    }

    /// Starts the thread that asks for one GPU, tells of it once it has it, and reads it: the driver may not come back with one that is
    /// broken, and the others are read all the same.
    fn read(&self, driver: Driver, index: u32, found: Sender<(u32, Gpu)>) {
        let (settings, pace, readings) =
            (self.settings.clone(), Arc::clone(&self.pace), self.readings.clone());
        let watched = Watched::new(&self.shared, Some(index));
        let started = thread::Builder::new().name(format!("roomtrace-gpu{index}")).spawn(move || {
            let Some(gpu) = find(driver, index, &watched) else { return };
            // Nobody waits for errors any more where nobody can.
            let _ = found.send((index, gpu.clone()));
            drop(found);
            read_gpu(gpu, index, &settings, &watched, &pace, &readings);
        });
        match started {
            Ok(thread) => self.pace.add(thread.thread()),
            Err(error) => tracing::warn!(%error, gpu = index, "a GPU is not read"),
        }
    }

    /// Waits for errors of all GPUs, for ever. They come as the driver comes back with them.
    fn watch(&self, driver: Driver, found: &Receiver<(u32, Gpu)>) {
        let set = match self.watched.call("nvmlEventSetCreate", || driver.events()) {
            Ok(set) => set,
            Err(why) => return self.watched.all(|s| s.events_error = Some(why.to_string())),
        };
        let (mut indexes, mut gpus) = (Vec::new(), Vec::new());
        while !self.pace.stopped() {
            let began = Instant::now();
            let first = if gpus.is_empty() {
                match found.recv_timeout(Duration::from_millis(WAIT.into())) {
                    Ok(first) => Some(first),
                    Err(RecvTimeoutError::Timeout) => continue,
                    // There is none whose errors could be told.
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            } else {
                None
            };
            for (index, gpu) in first.into_iter().chain(found.try_iter()) {
                match self.watched.call("nvmlDeviceRegisterEvents", || set.register(&gpu)) {
                    Ok(()) => {
                        indexes.push(index);
                        gpus.push(gpu);
                    }
                    Err(why) => {
                        self.watched.all(|s| s.events_refused.insert(index, why.to_string()));
                    }
                }
            }
            if gpus.is_empty() {
                continue;
            }
            let mut events = 0;
            while events < BURST && self.wait(&set, &indexes, &gpus) {
                events += 1;
            }
            // A driver that does not wait as it was asked to must not keep a processor busy.
            let pause = Duration::from_millis(WAIT.into()).saturating_sub(began.elapsed());
            if events == 0 || events == BURST {
                thread::park_timeout(pause);
            }
        }
    }

    /// Waits once: whether there was an event.
    fn wait(&self, set: &Events, indexes: &[u32], gpus: &[Gpu]) -> bool {
        let asked = Duration::from_millis(WAIT.into());
        let event = match self.watched.wait("nvmlEventSetWait", asked, || set.wait(WAIT, gpus)) {
            Ok(event) => event,
            Err(why) => {
                self.watched.all(|s| s.events_error = Some(why.to_string()));
                return false;
            }
        };
        self.watched.all(|s| s.events_error = None);
        let Some(event) = event else { return false };
        match event.gpu.and_then(|n| indexes.get(n)) {
            Some(index) if event.kind & XID != 0 => self.report(*index, What::Xid(event.data)),
            Some(index) if event.kind & TROUBLE != 0 => self.report(*index, What::Trouble(event.kind)),
            _ => self.watched.all(|s| s.events_unknown += 1),
        }
        true
    }

    fn report(&self, index: u32, what: What) {
        send(&self.readings, &self.watched, Reading { at: monotonic(), index, what });
    }
}

/// Loads the driver and looks how many GPUs it has, of which at most [`MAX_GPUS`] are read.
fn look(settings: &Settings, watched: &Watched) -> Result<(Driver, u32), String> {
    let library: Option<OsString> = settings.lib_path.clone().map(Into::into);
    let driver = watched.call("dlopen and nvmlInit", || Driver::load(library.as_deref()))?;
    let version = watched.call("nvmlSystemGetDriverVersion", || driver.version()).ok();
    let count = watched
        .call("nvmlDeviceGetCount", || driver.count())
        .map_err(|why| format!("the driver does not tell how many GPUs it has: {why}"))?;
    let most = u32::try_from(MAX_GPUS).unwrap_or(u32::MAX);
    watched.all(|s| {
        s.nvml = Library::Loaded(version);
        s.left_out = count.saturating_sub(most);
    });
    Ok((driver, count.min(most)))
}

/// Asks for one GPU; where there is none to be had, that is said of it. `watched`: its own.
fn find(driver: Driver, index: u32, watched: &Watched) -> Option<Gpu> {
    let gpu = watched.call("nvmlDeviceGetHandleByIndex", || driver.gpu(index));
    gpu.inspect_err(|why| watched.missing(&why.to_string())).ok()
}

fn read_gpu(
    gpu: Gpu,
    index: u32,
    settings: &Settings,
    watched: &Watched,
    pace: &Pace,
    readings: &SyncSender<Reading>,
) {
    let mut sampler = Sampler::new(gpu, index, settings, watched.clone());
    let name = watched.name();
    send(readings, watched, Reading { at: monotonic(), index, what: What::Named(name.into()) });
    let mut listens = true;
    sampler.links(&mut |at, what| listens &= send(readings, watched, Reading { at, index, what }));
    while listens && !pace.stopped() {
        let began = monotonic();
        sampler.turn(&mut |at, what| listens &= send(readings, watched, Reading { at, index, what }));
        pace.sleep_until(index, |busy| {
            let pause = sampler.pause(settings, busy);
            let seldom = pause > settings.busy;
            next_turn(began, pause, if seldom { settings.busy * index } else { Duration::ZERO })
        });
    }
}

/// When the turn after one that began at `began` is due, about `pause` later. Threads that read often do so at the same moments: a
/// processor that is awake for one of them is so for all, which costs a third less than eight that wake it one after the other.
/// Those that read seldom are `apart`, so that calls that take long do not meet in the driver.
fn next_turn(began: Mono, pause: Duration, apart: Duration) -> Mono {
    let nanos = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
    let pause = nanos(pause).max(1);
    let phase = nanos(apart) % pause;
    // The nearest that is neither this turn's own moment, where it was a little early, nor one that is nearly there.
    let turns = began.0.saturating_add(pause / 2).saturating_sub(phase) / pause + 1;
    Mono(turns.saturating_mul(pause).saturating_add(phase))
}

/// Hands a reading on; `false`: nobody listens any more.
fn send(to: &SyncSender<Reading>, watched: &Watched, reading: Reading) -> bool {
    match to.try_send(reading) {
        Ok(()) => true,
        Err(TrySendError::Full(_)) => {
            watched.all(|s| s.held += 1);
            true
        }
        Err(TrySendError::Disconnected(_)) => false,
    }
}

/// Looks once at what the driver has and which readings it gives, for `doctor`. Comes back within `limit`, whatever the driver does.
pub fn look_once(settings: &Settings, limit: Duration) -> Standing {
    let shared = Arc::<Mutex<Standing>>::default();
    let (done, ended) = mpsc::sync_channel::<()>(1);
    let (watched, settings) = (Watched::new(&shared, None), settings.clone());
    let inner = Arc::clone(&shared);
    let started = thread::Builder::new().name("roomtrace-gpu".to_owned()).spawn(move || {
        let (driver, count) = match look(&settings, &watched) {
            Err(why) => return watched.all(|s| s.nvml = Library::Absent(why)),
            Ok(all) => all,
        };
        // Each on its own, as when they are read for good.
        for index in 0..count {
            let (done, settings, watched) =
                (done.clone(), settings.clone(), Watched::new(&inner, Some(index)));
            let started = thread::Builder::new().name(format!("roomtrace-gpu{index}")).spawn(move || {
                let _done = done;
                let Some(gpu) = find(driver, index, &watched) else { return };
                let mut sampler = Sampler::new(gpu, index, &settings, watched);
                // Rates and counters need two readings.
                for pause in [settings.busy, Duration::ZERO] {
                    sampler.turn(&mut |_: Mono, _: What| ());
                    thread::sleep(pause);
                }
            });
            if let Err(error) = started {
                let why = format!("no thread could be started to read it: {error}");
                Watched::new(&inner, Some(index)).missing(&why);
            }
        }
    });
    match started {
        // Ends when the last sender is dropped, or at the limit.
        Ok(_) => drop(ended.recv_timeout(limit)),
        Err(error) => {
            let why = format!("no thread could be started to ask the driver: {error}");
            shared.lock().unwrap_or_else(PoisonError::into_inner).nvml = Library::Absent(why);
        }
    }
    shared.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_read_often_do_so_at_the_same_moments_and_seldom_apart() {
        let ms = |n: u64| Mono(n * 1_000_000);
        let (busy, idle) = (Duration::from_millis(125), Duration::from_secs(1));
        for gpu in 0..8 {
            let (apart, n) = (busy * gpu, u64::from(gpu));
            // However late, or a little early, a turn began.
            for (began, due) in [(1000, 1125), (999, 1125), (1060, 1125), (1063, 1250)] {
                assert_eq!(next_turn(ms(began), busy, Duration::ZERO), ms(due), "{began}");
            }
            assert_eq!(next_turn(ms(5000 + 125 * n), idle, apart), ms(6000 + 125 * n));
        }
        assert_eq!(next_turn(Mono(7), Duration::ZERO, busy), Mono(8));
    }
}
