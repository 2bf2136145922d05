//! Every reading that the agent takes from the driver, each alone and over and over: what it answers and how long it takes.
//!
//! For `cargo xtask gpu-check`; the agent itself never does this. Runs on the caller's thread and may hang with the driver.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::driver::{Driver, Gpu, Refused};
use super::sampler::{Ask, FIELDS, METRICS, RECOVERY};
use super::standing::{Standing, Watched};
use super::{Settings, find, look};

/// Time that an event is waited for, milliseconds.
const WAIT: u32 = 100;

/// One kind of reading of one GPU.
#[derive(Clone, Debug)]
pub struct Called {
    /// The driver's number for the GPU.
    pub index: u32,
    /// The GPU's name for good, or its number.
    pub gpu: String,
    /// What was read, by its name in `/status`; `events` for the wait for errors.
    pub reading: &'static str,
    /// What the driver said last, or why it said nothing.
    pub answer: Result<String, String>,
    /// How long each call took, shortest first.
    pub took: Vec<Duration>,
}

impl Called {
    /// The call in the middle.
    pub fn median(&self) -> Duration {
        self.took.get(self.took.len() / 2).copied().unwrap_or_default()
    }

    /// The longest one.
    pub fn worst(&self) -> Duration {
        self.took.last().copied().unwrap_or_default()
    }
}

/// Takes each reading of each GPU `rounds` times and tells it as soon as it is done. Returns the driver's version, where it has one, and
/// how many GPUs there are.
///
/// # Errors
///
/// Why there is no driver, for the operator.
pub fn each_call(
    settings: &Settings,
    rounds: u32,
    told: &mut dyn FnMut(Called),
) -> Result<(Option<String>, usize), String> {
    let shared = Arc::<Mutex<Standing>>::default();
    let (driver, count) = look(settings, &Watched::new(&shared, None))?;
    let had = |index| Some((index, find(driver, index, &Watched::new(&shared, Some(index)))?));
    let gpus: BTreeMap<u32, Gpu> = (0..count).filter_map(had).collect();
    for (index, gpu) in &gpus {
        of_gpu(*index, gpu, settings, rounds, told);
    }
    events(driver, &gpus, told);
    Ok((driver.version().ok(), gpus.len()))
}

fn name(index: u32, gpu: &Gpu) -> String {
    gpu.uuid().unwrap_or_else(|_| format!("index-{index}"))
}

fn of_gpu(index: u32, gpu: &Gpu, settings: &Settings, rounds: u32, told: &mut dyn FnMut(Called)) {
    let name = name(index, gpu);
    let mut tell = |ask: Ask, (answer, took)| {
        told(Called { index, gpu: name.clone(), reading: ask.label(), answer, took });
    };
    let none = Duration::ZERO;
    tell(Ask::Gpm, gpm(gpu, settings, rounds));
    tell(
        Ask::Counters,
        timed(rounds, none, || {
            Ok(gpu
                .fields(FIELDS)?
                .map(|value| match value {
                    Ok(told) => told.count.value.to_string(),
                    Err(refused) => refused.to_string(),
                })
                .join("; "))
        }),
    );
    // Takes 20 ms a direction, as nvml.h says.
    tell(
        Ask::Throughput,
        timed(rounds.min(10), none, || {
            Ok(format!("{} KB/s out, {} KB/s in", gpu.throughput(true)?, gpu.throughput(false)?))
        }),
    );
    tell(Ask::Utilization, timed(rounds, none, || Ok(format!("{} %", gpu.utilization()?))));
    tell(
        Ask::Recovery,
        timed(rounds, none, || {
            let [action] = gpu.fields([RECOVERY])?;
            Ok(action?.count.value.to_string())
        }),
    );
    tell(Ask::Clocks, timed(rounds, none, || Ok(format!("{:#x}", gpu.clocks()?))));
    let lives = |pid: u32| pid != 0 && Path::new(&format!("{}/{pid}", settings.proc)).exists();
    tell(Ask::Processes, timed(rounds, none, || Ok(format!("{:?}", gpu.processes(lives)?))));
}

type Timed = (Result<String, String>, Vec<Duration>);

/// Samples of GPM, as far apart as the agent takes them at its fastest.
fn gpm(gpu: &Gpu, settings: &Settings, rounds: u32) -> Timed {
    let made = gpu.has_gpm().and_then(|has| if has { gpu.gpm() } else { Err(Refused::NotSupported) });
    let mut gpm = match made {
        Ok(gpm) => gpm,
        Err(refused) => return (Err(refused.to_string()), Vec::new()),
    };
    timed(rounds.clamp(2, 20), settings.busy, || {
        let Some(rates) = gpm.rates(METRICS)? else { return Ok("one sample".to_owned()) };
        let rates = rates.map(|rate| match rate {
            Ok(rate) => format!("{rate:.1} MiB/s"),
            Err(refused) => refused.to_string(),
        });
        Ok(rates.join("; "))
    })
}

/// Calls until it was often enough, or until the answer will stay the same.
fn timed(rounds: u32, pause: Duration, mut call: impl FnMut() -> Result<String, Refused>) -> Timed {
    let (mut answer, mut took) = (Err("not asked".to_owned()), Vec::new());
    for _ in 0..rounds {
        let began = Instant::now();
        let said = call();
        took.push(began.elapsed());
        let over = said.as_ref().err().is_some_and(Refused::is_final);
        answer = said.map_err(|refused| refused.to_string());
        if over {
            break;
        }
        std::thread::sleep(pause);
    }
    took.sort_unstable();
    (answer, took)
}

/// Registers for errors of all GPUs and waits for one.
fn events(driver: Driver, gpus: &BTreeMap<u32, Gpu>, told: &mut dyn FnMut(Called)) {
    let set = driver.events();
    let all: Vec<Gpu> = gpus.values().cloned().collect();
    for (index, gpu) in gpus {
        let (answer, took) = timed(1, Duration::ZERO, || {
            let set = set.as_ref().map_err(Clone::clone)?;
            set.register(gpu)?;
            Ok(match set.wait(WAIT, &all)? {
                None => format!("none within {WAIT} ms"),
                Some(event) => format!("kind {:#x}, data {}", event.kind, event.data),
            })
        });
        told(Called { index: *index, gpu: name(*index, gpu), reading: "events", answer, took });
    }
}
