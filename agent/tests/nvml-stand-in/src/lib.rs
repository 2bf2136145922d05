//! For tests: a library with NVML's C interface that answers as a script says. It is loaded the way a driver's is. It also exports
//! what of the CUDA driver's interface copies bytes (`cuda`).
//!
//! The layouts are written down here again, from `nvml.h` 13.5, and not taken from the bindings that the agent uses: so the two check
//! each other. A symbol is taken away by renaming it in a copy of the built library.
#![allow(
    unsafe_code,
    non_snake_case,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::too_many_lines,
    missing_docs,
    unreachable_pub,
    reason = "a C interface for tests: whoever calls it passes what nvml.h asks for"
)]

mod cuda;
mod script;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use script::{Moved, Script};

type Return = c_uint;
const OK: Return = 0;
const INVALID_ARGUMENT: Return = 2;
const NOT_SUPPORTED: Return = 3;
const INSUFFICIENT_SIZE: Return = 7;
const TIMEOUT: Return = 10;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct FieldValue {
    field: c_uint,
    scope: c_uint,
    timestamp: i64,
    latency: i64,
    value_type: c_uint,
    result: Return,
    value: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct PciInfo {
    legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    id: c_uint,
    subsystem: c_uint,
    bus_id: [c_char; 32],
}

#[repr(C)]
pub struct EventData {
    device: *mut c_void,
    kind: u64,
    data: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

#[repr(C)]
pub struct GpmSupport {
    version: c_uint,
    supported: c_uint,
}

#[repr(C)]
pub struct GpmMetric {
    id: c_uint,
    result: Return,
    value: f64,
    names: [*const c_char; 3],
}

#[repr(C)]
pub struct GpmMetrics {
    version: c_uint,
    count: c_uint,
    before: *mut GpmSample,
    after: *mut GpmSample,
    metrics: [GpmMetric; 0],
}

const _: () = assert!(size_of::<FieldValue>() == 40);
const _: () = assert!(size_of::<PciInfo>() == 68);
const _: () = assert!(size_of::<EventData>() == 32);
const _: () = assert!(size_of::<GpmSupport>() == 8);
const _: () = assert!(size_of::<GpmMetric>() == 40);
const _: () = assert!(size_of::<GpmMetrics>() == 24);

/// What stands behind a `nvmlGpmSample_t`.
#[derive(Default)]
pub struct GpmSample {
    gpu: usize,
    moved: Moved,
}

static SCRIPT: Mutex<Option<Script>> = Mutex::new(None);

#[repr(C)]
struct DlInfo {
    file: *const c_char,
    base: *const c_void,
    symbol: *const c_char,
    address: *const c_void,
}

unsafe extern "C" {
    fn dladdr(address: *const c_void, info: *mut DlInfo) -> c_int;
}

/// Where this very copy of the library was loaded from, and its script beside it.
fn path() -> PathBuf {
    if let Some(path) = std::env::var_os("ROOMTRACE_NVML_SCRIPT") {
        return path.into();
    }
    let mut info = DlInfo {
        file: std::ptr::null(),
        base: std::ptr::null(),
        symbol: std::ptr::null(),
        address: std::ptr::null(),
    };
    let here = (&raw const SCRIPT).cast();
    if unsafe { dladdr(here, &raw mut info) } == 0 || info.file.is_null() {
        return PathBuf::new();
    }
    let mut file = unsafe { CStr::from_ptr(info.file) }.to_bytes().to_vec();
    file.extend_from_slice(b".script");
    std::ffi::OsStr::from_bytes(&file).into()
}

fn with<T>(act: impl FnOnce(&mut Script) -> T) -> T {
    let mut script = SCRIPT.lock().unwrap_or_else(PoisonError::into_inner);
    let script = script.get_or_insert_with(|| Script::new(path()));
    script.refresh();
    act(script)
}

/// One call: takes its time, answers the scripted code, or does what it is there for.
fn call(function: &str, gpu: Option<usize>, act: impl FnOnce(&mut Script) -> Return) -> Return {
    let (delay, code) = with(|s| (s.rule("delay", gpu, function), s.rule("fail", gpu, function)));
    std::thread::sleep(Duration::from_millis(delay.unwrap_or(0)));
    match code {
        Some(code) => code,
        None => with(act),
    }
}

/// The same for a GPU's own function.
fn of(device: *mut c_void, function: &str, act: impl FnOnce(&mut Script, usize) -> Return) -> Return {
    match (device as usize).checked_sub(0x1000) {
        Some(gpu) if gpu < with(|s| s.gpus()) => call(function, Some(gpu), |s| act(s, gpu)),
        _ => INVALID_ARGUMENT,
    }
}

fn handle(gpu: usize) -> *mut c_void {
    (gpu + 0x1000) as *mut c_void
}

unsafe fn put(text: &str, to: *mut c_char, room: c_uint) -> Return {
    if text.len() >= room as usize {
        return INSUFFICIENT_SIZE;
    }
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        *to.add(text.len()) = 0;
    }
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> Return {
    call("nvmlInit_v2", None, |_| OK)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> Return {
    call("nvmlInitWithFlags", None, |_| OK)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> Return {
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(to: *mut c_char, room: c_uint) -> Return {
    call("nvmlSystemGetDriverVersion", None, |s| unsafe {
        put(s.text("driver").unwrap_or("580.95.05"), to, room)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> Return {
    call("nvmlDeviceGetCount_v2", None, |s| unsafe {
        *count = s.gpus() as c_uint;
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut *mut c_void) -> Return {
    let gpu = index as usize;
    call("nvmlDeviceGetHandleByIndex_v2", Some(gpu), |s| unsafe {
        if gpu >= s.gpus() {
            return INVALID_ARGUMENT;
        }
        *device = handle(gpu);
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(device: *mut c_void, to: *mut c_char, room: c_uint) -> Return {
    of(device, "nvmlDeviceGetUUID", |s, gpu| unsafe {
        if s.is(gpu, "nonsense") {
            *to = 0xff_u8 as c_char;
            *to.add(1) = 0;
            return OK;
        }
        put(&s.uuid(gpu), to, room)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(device: *mut c_void, to: *mut c_char, room: c_uint) -> Return {
    of(device, "nvmlDeviceGetName", |s, gpu| unsafe {
        put(s.text(&format!("{gpu}.name")).unwrap_or("Stand-in"), to, room)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: *mut c_void, to: *mut PciInfo) -> Return {
    of(device, "nvmlDeviceGetPciInfo_v3", |_, gpu| unsafe {
        *to = std::mem::zeroed();
        (*to).bus = gpu as c_uint;
        let id = format!("00000000:{gpu:02X}:00.0");
        put(&id, (&raw mut (*to).bus_id).cast(), 32)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkState(
    device: *mut c_void,
    link: c_uint,
    to: *mut c_uint,
) -> Return {
    of(device, "nvmlDeviceGetNvLinkState", |s, gpu| unsafe {
        match s.of::<c_uint>(gpu, "nvlinks").unwrap_or(if s.has_nvlink(gpu) { 18 } else { 0 }) {
            0 => NOT_SUPPORTED,
            links if link >= links => INVALID_ARGUMENT,
            links => {
                // All but the last are down.
                *to = c_uint::from(link + 1 == links);
                OK
            }
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetC2cModeInfoV(device: *mut c_void, to: *mut c_uint) -> Return {
    of(device, "nvmlDeviceGetC2cModeInfoV", |s, gpu| unsafe {
        *to = c_uint::from(s.is(gpu, "c2c"));
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigMode(
    device: *mut c_void,
    now: *mut c_uint,
    next: *mut c_uint,
) -> Return {
    of(device, "nvmlDeviceGetMigMode", |s, gpu| unsafe {
        let Some(mode) = s.of(gpu, "mig") else { return NOT_SUPPORTED };
        (*now, *next) = (mode, mode);
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetVirtualizationMode(device: *mut c_void, mode: *mut c_uint) -> Return {
    of(device, "nvmlDeviceGetVirtualizationMode", |s, gpu| unsafe {
        *mode = s.of(gpu, "virtualization").unwrap_or(0);
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxPcieLinkGeneration(device: *mut c_void, to: *mut c_uint) -> Return {
    of(device, "nvmlDeviceGetMaxPcieLinkGeneration", |s, gpu| unsafe {
        *to = s.of(gpu, "generation").unwrap_or(5);
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxPcieLinkWidth(device: *mut c_void, to: *mut c_uint) -> Return {
    of(device, "nvmlDeviceGetMaxPcieLinkWidth", |_, _| unsafe {
        *to = 16;
        OK
    })
}

/// Takes its 20 ms, as the driver's does, and tells what moved in them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPcieThroughput(
    device: *mut c_void,
    counter: c_uint,
    to: *mut c_uint,
) -> Return {
    let gpu = (device as usize).wrapping_sub(0x1000);
    let before = with(|s| if gpu < s.gpus() { s.moved(gpu) } else { Moved::default() });
    std::thread::sleep(Duration::from_millis(20));
    of(device, "nvmlDeviceGetPcieThroughput", |s, gpu| unsafe {
        if s.of::<u32>(gpu, "throughput") == Some(0) || s.of::<u32>(gpu, "virtualization") == Some(2) {
            return NOT_SUPPORTED;
        }
        let (now, way) = (s.moved(gpu), usize::from(counter != 0));
        let seconds = match (before.at, now.at) {
            (Some(before), Some(now)) => now.duration_since(before).as_secs_f64().max(1e-6),
            _ => return INVALID_ARGUMENT,
        };
        let rate = (now.pcie[way] - before.pcie[way]) / seconds;
        *to = if s.is(gpu, "nonsense") { c_uint::MAX } else { (rate / 1e3) as c_uint };
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetFieldValues(
    device: *mut c_void,
    count: c_int,
    values: *mut FieldValue,
) -> Return {
    of(device, "nvmlDeviceGetFieldValues", |s, gpu| {
        let values = unsafe { std::slice::from_raw_parts_mut(values, count as usize) };
        let moved = s.moved(gpu);
        for value in values {
            field(s, gpu, moved, value);
            value.timestamp = moved.wall;
        }
        OK
    })
}

fn field(s: &Script, gpu: usize, moved: Moved, to: &mut FieldValue) {
    (to.result, to.value_type) = (OK, 3);
    let plain = s.of::<u32>(gpu, "fields") != Some(0) && s.of::<u32>(gpu, "virtualization") != Some(2);
    let narrow = s.of::<u32>(gpu, "bits") == Some(32);
    let pcie =
        |way: usize| if narrow { moved.pcie[way] as u64 & 0xffff_ffff } else { moved.pcie[way] as u64 };
    match to.field {
        197 | 198 if plain => {
            to.value = pcie((to.field - 197) as usize);
            to.value_type = if narrow { 1 } else { 3 };
        }
        // Only the sum over all links; in KiB.
        138 | 139 if plain && s.has_nvlink(gpu) && to.scope == c_uint::MAX => {
            to.value = (moved.nvlink[(to.field - 138) as usize] / 1024.0) as u64;
        }
        230 => {
            to.value = s.of(gpu, "recovery").unwrap_or(0);
            to.value_type = 1;
        }
        _ => to.result = NOT_SUPPORTED,
    }
    if s.is(gpu, "nonsense") {
        (to.result, to.value_type, to.value) = (OK, 77, u64::MAX);
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUtilizationRates(device: *mut c_void, to: *mut [c_uint; 2]) -> Return {
    of(device, "nvmlDeviceGetUtilizationRates", |s, gpu| unsafe {
        if s.is(gpu, "mig") {
            return NOT_SUPPORTED;
        }
        let nonsense = s.is(gpu, "nonsense");
        *to = if nonsense { [4_000_000_000; 2] } else { [s.of(gpu, "util").unwrap_or(0); 2] };
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: *mut c_void,
    count: *mut c_uint,
    to: *mut u8,
) -> Return {
    of(device, "nvmlDeviceGetComputeRunningProcesses_v3", |s, gpu| {
        let pids: Vec<u32> = s
            .text(&format!("{gpu}.pids"))
            .unwrap_or_default()
            .split(',')
            .filter_map(|p| p.trim().parse().ok())
            .collect();
        let room = unsafe { *count } as usize;
        if s.is(gpu, "nonsense") {
            unsafe { *count = c_uint::MAX };
            return OK;
        }
        unsafe { *count = pids.len() as c_uint };
        if pids.len() > room || (to.is_null() && !pids.is_empty()) {
            return INSUFFICIENT_SIZE;
        }
        let stride: usize = s.of(gpu, "stride").unwrap_or(24);
        for (n, pid) in pids.iter().enumerate() {
            let mut entry = [0_u8; 32];
            entry[..4].copy_from_slice(&pid.to_ne_bytes());
            entry[8..16].copy_from_slice(&(1_u64 << 30).to_ne_bytes());
            entry[16..24].fill(0xff);
            unsafe { std::ptr::copy_nonoverlapping(entry.as_ptr(), to.add(n * stride), stride) };
        }
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrentClocksEventReasons(device: *mut c_void, to: *mut u64) -> Return {
    of(device, "nvmlDeviceGetCurrentClocksEventReasons", |s, gpu| unsafe {
        *to = s.of(gpu, "clocks").unwrap_or(0);
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetCreate(set: *mut *mut c_void) -> Return {
    call("nvmlEventSetCreate", None, |_| unsafe {
        *set = 0x77 as *mut c_void;
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetSupportedEventTypes(device: *mut c_void, to: *mut u64) -> Return {
    of(device, "nvmlDeviceGetSupportedEventTypes", |_, _| unsafe {
        *to = 0x1f;
        OK
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceRegisterEvents(device: *mut c_void, _types: u64, _set: *mut c_void) -> Return {
    of(device, "nvmlDeviceRegisterEvents", |s, gpu| {
        s.registered.insert(gpu);
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetWait_v2(
    _set: *mut c_void,
    data: *mut EventData,
    timeout: c_uint,
) -> Return {
    let mut left = timeout;
    loop {
        let code = call("nvmlEventSetWait_v2", None, |s| {
            let Some((gpu, xid)) = s.next_xid() else { return TIMEOUT };
            let all = c_uint::MAX;
            unsafe {
                *data = EventData {
                    device: handle(gpu),
                    kind: 8,
                    data: xid,
                    gpu_instance: all,
                    compute_instance: all,
                };
            }
            OK
        });
        if code != TIMEOUT || left == 0 {
            return code;
        }
        // The driver's wakes nobody before there is one; this looks ten times a second.
        let step = left.min(100);
        std::thread::sleep(Duration::from_millis(step.into()));
        left -= step;
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetFree(_set: *mut c_void) -> Return {
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmQueryDeviceSupport(device: *mut c_void, to: *mut GpmSupport) -> Return {
    of(device, "nvmlGpmQueryDeviceSupport", |s, gpu| unsafe {
        (*to).supported = c_uint::from(s.is(gpu, "gpm"));
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmSampleAlloc(to: *mut *mut GpmSample) -> Return {
    call("nvmlGpmSampleAlloc", None, |_| unsafe {
        *to = Box::into_raw(Box::default());
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmSampleGet(device: *mut c_void, sample: *mut GpmSample) -> Return {
    of(device, "nvmlGpmSampleGet", |s, gpu| unsafe {
        if !s.is(gpu, "gpm") {
            return NOT_SUPPORTED;
        }
        *sample = GpmSample { gpu, moved: s.moved(gpu) };
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmMetricsGet(to: *mut GpmMetrics) -> Return {
    let (before, after, count) = unsafe { (&*(*to).before, &*(*to).after, (*to).count as usize) };
    let metrics =
        unsafe { std::slice::from_raw_parts_mut((&raw mut (*to).metrics).cast::<GpmMetric>(), count) };
    call("nvmlGpmMetricsGet", Some(after.gpu), |s| {
        let (a, b) = (before.moved, after.moved);
        let seconds = match (a.at, b.at) {
            (Some(a), Some(b)) => b.duration_since(a).as_secs_f64().max(1e-6),
            _ => return INVALID_ARGUMENT,
        };
        let rate = |a: f64, b: f64| (b - a) / seconds / 1_048_576.0;
        let (mig, nvlink) = (s.is(after.gpu, "mig"), s.has_nvlink(after.gpu));
        for m in metrics {
            (m.result, m.names) = (OK, [std::ptr::null(); 3]);
            m.value = match m.id {
                20 if !mig => rate(a.pcie[0], b.pcie[0]),
                21 if !mig => rate(a.pcie[1], b.pcie[1]),
                60 if nvlink => rate(a.nvlink[1], b.nvlink[1]),
                61 if nvlink => rate(a.nvlink[0], b.nvlink[0]),
                _ => {
                    m.result = NOT_SUPPORTED;
                    0.0
                }
            };
            if s.is(after.gpu, "nonsense") {
                (m.result, m.value) = (OK, f64::NAN);
            }
        }
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmSampleFree(sample: *mut GpmSample) -> Return {
    drop(unsafe { Box::from_raw(sample) });
    OK
}
