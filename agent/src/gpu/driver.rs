//! The edge to the GPU driver's library (NVML): loads it and turns its calls into values.
//!
//! The one place besides `kernel` with unsafe code: calls through the library's C interface, of which each says why its arguments are
//! right. Every call may block for as long as the driver likes, so all of this belongs on threads of its own. The crate `nvml-wrapper`
//! loads and wraps the library; the calls here go past it where it falls short: field values with a scope, GPM by number, events
//! with all their bits, clock reasons, process lists in a driver that gets their layout wrong, and names that are no text. A symbol
//! that the library lacks is an answer, never a panic: the bindings' own methods panic, so their fields are asked. For the same reason
//! nothing here is ever shut down or dropped: the library stays loaded until the process ends.
#![allow(unsafe_code, reason = "the driver speaks C")]

use std::ffi::{CStr, OsStr, c_char, c_uint};
use std::fmt;
use std::sync::Arc;

use nvml_wrapper::enum_wrappers::device::{GpuVirtualizationMode, PcieUtilCounter};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as c;

use super::counter::{Count, Told, Width};

/// The library's name where none is configured.
pub(super) const LIBRARY: &str = "libnvidia-ml.so.1";

/// Processes of one GPU that are asked for at once.
const PROCESSES: usize = super::model::MAX_PROCESSES;

/// Length of `nvmlProcessInfo_t` version 2 and 3.
const STRIDE: usize = 24;

/// The same as early drivers of release 535 wrote it without saying so (535.54.03: `usedGpuCcProtectedMemory` behind it).
const STRIDE_535: usize = 32;

/// Why the driver gives no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// This GPU, driver or mode does not have it: not worth asking again.
    NotSupported,
    /// The library has no such function: not worth asking again.
    Missing,
    /// Not with this agent's rights.
    NoPermission,
    /// The GPU does not answer any more.
    Lost,
    /// It answered with something that cannot be.
    Nonsense(&'static str),
    /// Anything else, by the driver's number (`nvmlReturn_t`).
    Code(u32),
    /// The same, where only a text is known.
    Other(String),
}

impl Refused {
    /// Whether the answer will stay the same.
    pub(super) fn is_final(&self) -> bool {
        matches!(self, Self::NotSupported | Self::Missing | Self::NoPermission)
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSupported => f.write_str("not supported by this GPU, driver or mode"),
            Self::Missing => f.write_str("not in this driver's library"),
            Self::NoPermission => f.write_str("not allowed to the agent"),
            Self::Lost => f.write_str("the GPU does not answer"),
            Self::Nonsense(what) => write!(f, "the driver answered with {what}"),
            Self::Code(code) => write!(f, "the driver answered with error {code}"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

impl From<NvmlError> for Refused {
    fn from(error: NvmlError) -> Self {
        match error {
            NvmlError::NotSupported => Self::NotSupported,
            NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => Self::Missing,
            NvmlError::NoPermission => Self::NoPermission,
            NvmlError::GpuLost | NvmlError::ResetRequired => Self::Lost,
            NvmlError::Utf8Error(_) => Self::Nonsense("a name that is no text"),
            NvmlError::UnexpectedVariant(code) => Self::Code(code),
            other => Self::Other(other.to_string()),
        }
    }
}

/// What a return code says.
fn checked(code: c::nvmlReturn_t) -> Result<(), Refused> {
    match code {
        c::nvmlReturn_enum_NVML_SUCCESS => Ok(()),
        c::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED => Err(Refused::NotSupported),
        c::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND => Err(Refused::Missing),
        c::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => Err(Refused::NoPermission),
        c::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST | c::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => {
            Err(Refused::Lost)
        }
        other => Err(Refused::Code(other)),
    }
}

/// The loaded library.
#[derive(Clone, Copy, Debug)]
pub(super) struct Driver {
    nvml: &'static Nvml,
}

/// Calls a function of the library past the wrapper; the symbol may be missing.
macro_rules! call {
    ($nvml:expr, $function:ident ( $($argument:expr),* )) => {{
        let Ok(function) = $nvml.lib().$function.as_ref() else { return Err(Refused::Missing) };
        // SAFETY: the function has the type that nvml.h gives it; pointers passed here come from a live reference or buffer of
        // the type it names, handles from the library itself, which is never unloaded.
        checked(unsafe { function($($argument),*) })
    }};
}

impl Driver {
    /// Loads the library and starts it.
    ///
    /// # Errors
    ///
    /// A sentence for the operator: why there is no driver.
    pub(super) fn load(library: Option<&OsStr>) -> Result<Self, String> {
        let library = library.unwrap_or(OsStr::new(LIBRARY));
        match Nvml::builder().lib_path(library).init() {
            Ok(nvml) => Ok(Self { nvml: Box::leak(Box::new(nvml)) }),
            Err(NvmlError::LibloadingError(error)) => Err(format!("{error}")),
            Err(NvmlError::FailedToLoadSymbol(_)) => {
                Err(format!("{} is not the driver's library: it lacks nvmlInit_v2", library.display()))
            }
            Err(error) => Err(format!("{} is there, but {error}", library.display())),
        }
    }

    /// The driver's version.
    pub(super) fn version(self) -> Result<String, Refused> {
        text(|to, room| call!(self.nvml, nvmlSystemGetDriverVersion(to, room)))
    }

    /// How many GPUs there are.
    pub(super) fn count(self) -> Result<u32, Refused> {
        Ok(self.nvml.device_count()?)
    }

    /// One of them.
    pub(super) fn gpu(self, index: u32) -> Result<Gpu, Refused> {
        let device = self.nvml.device_by_index(index)?;
        Ok(Gpu { nvml: self.nvml, device: Arc::new(device) })
    }

    /// A set to wait for events with.
    pub(super) fn events(self) -> Result<Events, Refused> {
        let mut set: c::nvmlEventSet_t = std::ptr::null_mut();
        call!(self.nvml, nvmlEventSetCreate(&raw mut set))?;
        Ok(Events { nvml: self.nvml, set })
    }
}

/// A text that a function writes into a buffer.
fn text(write: impl FnOnce(*mut c_char, c_uint) -> Result<(), Refused>) -> Result<String, Refused> {
    // Longest that nvml.h names is 96 (NVML_DEVICE_UUID_V2_BUFFER_SIZE, NVML_DEVICE_NAME_V2_BUFFER_SIZE).
    let mut buffer = [0_u8; 128];
    write(buffer.as_mut_ptr().cast(), 96)?;
    let text = CStr::from_bytes_until_nul(&buffer).ok().and_then(|text| text.to_str().ok());
    let plain = text.filter(|t| !t.is_empty() && t.bytes().all(|b| (0x20..0x7f).contains(&b)));
    plain.map(str::to_owned).ok_or(Refused::Nonsense("a name that is no text"))
}

/// One GPU.
#[derive(Clone)]
pub(super) struct Gpu {
    nvml: &'static Nvml,
    device: Arc<Device<'static>>,
}

/// What a field value of type unsigned may be (`nvml.h`, `nvmlValueType_t`).
const UNSIGNED_INT: u32 = c::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT;
const UNSIGNED_LONG: u32 = c::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG;
const UNSIGNED_LONG_LONG: u32 = c::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;

impl Gpu {
    fn handle(&self) -> c::nvmlDevice_t {
        // SAFETY: the handle is only passed back to the library it came from, which is never unloaded.
        unsafe { self.device.handle() }
    }

    /// Its name for good (`GPU-…`).
    pub(super) fn uuid(&self) -> Result<String, Refused> {
        text(|to, room| call!(self.nvml, nvmlDeviceGetUUID(self.handle(), to, room)))
    }

    /// What it is.
    pub(super) fn model(&self) -> Result<String, Refused> {
        text(|to, room| call!(self.nvml, nvmlDeviceGetName(self.handle(), to, room)))
    }

    /// Whether it is split into instances.
    pub(super) fn mig(&self) -> Result<bool, Refused> {
        Ok(self.device.mig_mode()?.current == 1)
    }

    /// What virtual machine it belongs to, if any.
    pub(super) fn virtualization(&self) -> Result<&'static str, Refused> {
        Ok(match self.device.virtualization_mode()? {
            GpuVirtualizationMode::Bare => "none",
            GpuVirtualizationMode::PassThrough => "passed through",
            GpuVirtualizationMode::Vgpu => "vGPU guest",
            GpuVirtualizationMode::HostVgpu => "vGPU host",
            GpuVirtualizationMode::HostVsga => "vSGA host",
        })
    }

    /// Generation and width of its `PCIe` link at its best.
    pub(super) fn pcie_link(&self) -> (Option<u32>, Option<u32>) {
        (self.device.max_pcie_link_gen().ok(), self.device.max_pcie_link_width().ok())
    }

    /// Whether any of its `NVLink`s is up.
    pub(super) fn nvlink(&self) -> Result<bool, Refused> {
        for link in 0..c::NVML_NVLINK_MAX_LINKS {
            let mut state = c::nvmlEnableState_enum_NVML_FEATURE_DISABLED;
            match call!(self.nvml, nvmlDeviceGetNvLinkState(self.handle(), link, &raw mut state)) {
                Ok(()) if state == c::nvmlEnableState_enum_NVML_FEATURE_ENABLED => return Ok(true),
                Ok(()) => {}
                // It has none, or no more than those asked so far.
                Err(
                    Refused::NotSupported | Refused::Code(c::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT),
                ) => {
                    return Ok(false);
                }
                Err(refused) => return Err(refused),
            }
        }
        Ok(false)
    }

    /// Whether it is joined to the processor of a superchip.
    pub(super) fn c2c(&self) -> Result<bool, Refused> {
        let mut info = c::nvmlC2cModeInfo_v1_t { isC2cEnabled: 0 };
        match call!(self.nvml, nvmlDeviceGetC2cModeInfoV(self.handle(), &raw mut info)) {
            Ok(()) => Ok(info.isC2cEnabled != 0),
            // A library that does not know of it is older than the first superchip (release 535).
            Err(Refused::NotSupported | Refused::Missing) => Ok(false),
            Err(refused) => Err(refused),
        }
    }

    /// `PCIe` rate of the last 20 ms, KB/s, one direction; takes as long.
    pub(super) fn throughput(&self, out: bool) -> Result<u32, Refused> {
        let counter = if out { PcieUtilCounter::Send } else { PcieUtilCounter::Receive };
        Ok(self.device.pcie_throughput(counter)?)
    }

    /// Share of the last sixth of a second to second in which a kernel ran, percent.
    pub(super) fn utilization(&self) -> Result<u8, Refused> {
        let percent = self.device.utilization_rates()?.gpu;
        u8::try_from(percent).ok().filter(|p| *p <= 100).ok_or(Refused::Nonsense("more than 100 percent"))
    }

    /// Numbers behind field ids, each with its scope, in one call.
    pub(super) fn fields<const N: usize>(
        &self,
        ids: [(u32, u32); N],
    ) -> Result<[Result<Told, Refused>; N], Refused> {
        let mut values = ids.map(|(field, scope)| c::nvmlFieldValue_t {
            fieldId: field,
            scopeId: scope,
            timestamp: 0,
            latencyUsec: 0,
            valueType: 0,
            nvmlReturn: c::nvmlReturn_enum_NVML_ERROR_UNKNOWN,
            value: c::nvmlValue_t { ullVal: 0 },
        });
        let count = i32::try_from(N).unwrap_or(0);
        call!(self.nvml, nvmlDeviceGetFieldValues(self.handle(), count, values.as_mut_ptr()))?;
        Ok(values.map(|v| {
            checked(v.nvmlReturn)?;
            // SAFETY: every member of the union is plain data within its first eight bytes, all of which were set above.
            let wide = unsafe { v.value.ullVal };
            let count = match v.valueType {
                UNSIGNED_INT => Count { value: wide & 0xffff_ffff, width: Width::Bits32 },
                UNSIGNED_LONG | UNSIGNED_LONG_LONG => Count { value: wide, width: Width::Bits64 },
                _ => return Err(Refused::Nonsense("a value of an unknown type")),
            };
            Ok(Told { count, taken: v.timestamp })
        }))
    }

    /// Why its clocks are lowered, as bits.
    pub(super) fn clocks(&self) -> Result<u64, Refused> {
        let mut reasons = 0;
        call!(self.nvml, nvmlDeviceGetCurrentClocksEventReasons(self.handle(), &raw mut reasons))?;
        Ok(reasons)
    }

    /// Processes that compute on it, by themselves or through MPS, and for which `lives` holds, sorted.
    pub(super) fn processes(&self, lives: impl Fn(u32) -> bool) -> Result<Vec<u32>, Refused> {
        let mut found = list(&lives, |count, room| {
            call!(self.nvml, nvmlDeviceGetComputeRunningProcesses_v3(self.handle(), count, room))
        })?;
        // Most hosts have no MPS and many drivers do not know it.
        found.extend(
            list(&lives, |count, room| {
                call!(self.nvml, nvmlDeviceGetMPSComputeRunningProcesses_v3(self.handle(), count, room))
            })
            .unwrap_or_default(),
        );
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Whether it has GPM.
    pub(super) fn has_gpm(&self) -> Result<bool, Refused> {
        Ok(self.device.gpm_support()?)
    }

    /// Samples to take GPM's rates from.
    pub(super) fn gpm(&self) -> Result<Gpm, Refused> {
        let alloc = || -> Result<c::nvmlGpmSample_t, Refused> {
            let mut sample: c::nvmlGpmSample_t = std::ptr::null_mut();
            call!(self.nvml, nvmlGpmSampleAlloc(&raw mut sample))?;
            if sample.is_null() { Err(Refused::Nonsense("no GPM sample")) } else { Ok(sample) }
        };
        // SAFETY: numbers and pointers only, for all of which zero is a value.
        let get: Box<c::nvmlGpmMetricsGet_t> = Box::new(unsafe { std::mem::zeroed() });
        Ok(Gpm { gpu: self.clone(), before: alloc()?, after: alloc()?, filled: false, get })
    }
}

/// A list of processes that a function writes.
fn list(
    lives: impl Fn(u32) -> bool,
    write: impl FnOnce(*mut c_uint, *mut c::nvmlProcessInfo_t) -> Result<(), Refused>,
) -> Result<Vec<u32>, Refused> {
    // Room for the longer of the two layouts, whichever the driver writes.
    let mut room = [0_u64; PROCESSES * STRIDE_535 / 8];
    let mut count = c_uint::try_from(PROCESSES).unwrap_or(0);
    write(&raw mut count, room.as_mut_ptr().cast())?;
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    if count > PROCESSES {
        return Err(Refused::Nonsense("more processes than there was room for"));
    }
    Ok(pids(&room, count, lives))
}

/// Process ids of a list in the layout that makes sense: every one of it lives. Where neither does, those that live in the layout that
/// nvml.h gives.
fn pids(words: &[u64], count: usize, lives: impl Fn(u32) -> bool) -> Vec<u32> {
    let read = |stride: usize| -> Vec<u32> {
        let ids = (0..count).filter_map(|n| words.get(n * stride / 8));
        // The id is the first four bytes of each.
        ids.map(|word| {
            u32::from_ne_bytes([0, 1, 2, 3].map(|n| word.to_ne_bytes().get(n).copied().unwrap_or(0)))
        })
        .collect()
    };
    let right = read(STRIDE);
    if right.iter().all(|pid| lives(*pid)) {
        return right;
    }
    let shifted = read(STRIDE_535);
    if shifted.iter().all(|pid| lives(*pid)) {
        return shifted;
    }
    right.into_iter().filter(|pid| lives(*pid)).collect()
}

/// Two samples of GPM: the rates between them.
pub(super) struct Gpm {
    gpu: Gpu,
    before: c::nvmlGpmSample_t,
    after: c::nvmlGpmSample_t,
    /// `before` holds a sample.
    filled: bool,
    /// What the driver fills in: 8 KiB, of which each call needs a part.
    get: Box<c::nvmlGpmMetricsGet_t>,
}

/// What GPM tells: a rate in MiB/s, or why not.
pub(super) type Rate = Result<f64, Refused>;

impl Gpm {
    /// Takes a sample; from the second on also the mean rates since the last. More than 100 ms must lie between two (`nvml.h`,
    /// GPM: the driver refreshes no faster).
    pub(super) fn rates<const N: usize>(&mut self, metrics: [u32; N]) -> Result<Option<[Rate; N]>, Refused> {
        if let Err(refused) = self.sample() {
            // What the sample holds now is not known.
            self.filled = false;
            return Err(refused);
        }
        let rates = if self.filled { Some(self.between(metrics)?) } else { None };
        std::mem::swap(&mut self.before, &mut self.after);
        self.filled = true;
        Ok(rates)
    }

    /// The next rates begin with the next sample.
    pub(super) fn forget(&mut self) {
        self.filled = false;
    }

    fn sample(&self) -> Result<(), Refused> {
        call!(self.gpu.nvml, nvmlGpmSampleGet(self.gpu.handle(), self.after))
    }

    fn between<const N: usize>(&mut self, metrics: [u32; N]) -> Result<[Rate; N], Refused> {
        let get = &mut *self.get;
        // NVML_GPM_METRICS_GET_VERSION
        get.version = 1;
        get.numMetrics = c_uint::try_from(N.min(get.metrics.len())).unwrap_or(0);
        (get.sample1, get.sample2) = (self.before, self.after);
        for (to, id) in get.metrics.iter_mut().zip(metrics) {
            (to.metricId, to.nvmlReturn, to.value) = (id, c::nvmlReturn_enum_NVML_ERROR_UNKNOWN, 0.0);
        }
        call!(self.gpu.nvml, nvmlGpmMetricsGet(&raw mut *get))?;
        Ok(std::array::from_fn(|n| {
            let metric = get.metrics.get(n).ok_or(Refused::NotSupported)?;
            checked(metric.nvmlReturn)?;
            Ok(metric.value)
        }))
    }
}

/// Events of all GPUs.
pub(super) struct Events {
    nvml: &'static Nvml,
    set: c::nvmlEventSet_t,
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceEvent {
    /// Which of the registered GPUs; `None`: none of them.
    pub(super) gpu: Option<usize>,
    /// Bits of `nvml.h`, `nvmlEventType…`.
    pub(super) kind: u64,
    /// With an Xid, its number.
    pub(super) data: u64,
}

/// `nvmlEventTypeXidCriticalError`.
pub(super) const XID: u64 = c::nvmlEventTypeXidCriticalError as u64;

/// Later bits that tell of a device in trouble (`nvml.h` 13.5): poison that is fatal, GPU unavailable, recovery action changed.
pub(super) const TROUBLE: u64 = 0x2000 | 0x4000 | 0x8000;

impl Events {
    /// Waits for those events of a GPU that it can tell, of [`XID`] and [`TROUBLE`].
    pub(super) fn register(&self, gpu: &Gpu) -> Result<(), Refused> {
        let mut able = 0;
        call!(self.nvml, nvmlDeviceGetSupportedEventTypes(gpu.handle(), &raw mut able))?;
        let wanted = able & (XID | TROUBLE);
        if wanted & XID == 0 {
            return Err(Refused::NotSupported);
        }
        call!(self.nvml, nvmlDeviceRegisterEvents(gpu.handle(), wanted, self.set))
    }

    /// The next event; `None`: there was none for `millis`.
    pub(super) fn wait(&self, millis: u32, gpus: &[Gpu]) -> Result<Option<DeviceEvent>, Refused> {
        let mut data = c::nvmlEventData_t {
            device: std::ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: 0,
            computeInstanceId: 0,
        };
        match call!(self.nvml, nvmlEventSetWait_v2(self.set, &raw mut data, millis)) {
            Err(Refused::Code(c::nvmlReturn_enum_NVML_ERROR_TIMEOUT)) => Ok(None),
            Err(refused) => Err(refused),
            Ok(()) => Ok(Some(DeviceEvent {
                gpu: gpus.iter().position(|g| g.handle() == data.device),
                kind: data.eventType,
                data: data.eventData,
            })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(ids: &[u32], words: usize) -> Vec<u64> {
        let mut out = vec![u64::MAX; PROCESSES * STRIDE_535 / 8];
        for (n, id) in ids.iter().enumerate() {
            if let Some(word) = out.get_mut(n * words) {
                *word = u64::from(*id);
            }
        }
        out
    }

    #[test]
    fn a_list_in_the_longer_layout_is_read_as_such() {
        let lives = |pid| [10, 20, 30, 40].contains(&pid);
        assert_eq!(pids(&list(&[10, 20, 30], 3), 3, lives), [10, 20, 30]);
        assert_eq!(pids(&list(&[30, 20, 10], 4), 3, lives), [30, 20, 10]);
        assert_eq!(pids(&list(&[10, 99, 30], 3), 3, lives), [10, 30]);
        assert_eq!(pids(&list(&[10], 3), 0, lives), Vec::<u32>::new());
    }
}
