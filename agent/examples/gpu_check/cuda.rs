//! Copies between host and GPU through the CUDA driver's library, which is loaded when asked: no toolkit is needed to build or run.
//!
//! The functions and their types are those of `cuda.h` 13; all of them are in every driver since CUDA 4 but `cuDeviceGetUuid` (9.2).
#![allow(unsafe_code, reason = "the driver speaks C")]

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};

use libloading::Library;

/// The library's name where none is given.
const LIBRARY: &str = "libcuda.so.1";

type Code = c_int;

/// The way of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Host to GPU: arrives there.
    ToGpu,
    /// GPU to host: leaves it.
    FromGpu,
}

/// The loaded library. It stays loaded until the program ends.
#[derive(Clone, Copy)]
pub(crate) struct Cuda {
    loaded: &'static Library,
}

/// Calls a function by its name and type; an error is a sentence.
macro_rules! call {
    ($cuda:expr, $name:literal, ($($argument:expr => $kind:ty),*)) => {{
        let cuda: Cuda = $cuda;
        // SAFETY: the type is the one that cuda.h gives the function of this name.
        let function = unsafe {
            cuda.loaded.get::<unsafe extern "C" fn($($kind),*) -> Code>(concat!($name, "\0").as_bytes())
        };
        match function {
            // SAFETY: pointers passed here come from a live reference or buffer of the type and size that cuda.h asks for, handles
            // from the library itself, which is never unloaded.
            Ok(function) => match unsafe { function($($argument),*) } {
                0 => Ok(()),
                code => Err(format!("{} answered {}", $name, cuda.error(code))),
            },
            Err(_) => Err(format!("the library has no {}", $name)),
        }
    }};
}

impl Cuda {
    /// Loads the library and starts it.
    ///
    /// # Errors
    /// Why there is no CUDA, for the operator.
    pub(crate) fn load(library: Option<&OsStr>) -> Result<Self, String> {
        let library = library.unwrap_or(OsStr::new(LIBRARY));
        // SAFETY: the driver's library may run code when it is loaded; whoever names another asks for that one's.
        let loaded = unsafe { Library::new(library) }.map_err(|e| e.to_string())?;
        let cuda = Self { loaded: Box::leak(Box::new(loaded)) };
        call!(cuda, "cuInit", (0 => c_uint))?;
        Ok(cuda)
    }

    fn error(self, code: Code) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: as in `call!`; not through it, which would come back here.
        let known = unsafe {
            let f = self
                .loaded
                .get::<unsafe extern "C" fn(Code, *mut *const c_char) -> Code>(b"cuGetErrorName\0");
            f.is_ok_and(|f| f(code, &raw mut name) == 0) && !name.is_null()
        };
        // SAFETY: the library answers with a text of its own that ends with a zero byte.
        if known { unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned() } else { code.to_string() }
    }

    /// Its version, such as 12080 for 12.8.
    pub(crate) fn version(self) -> Option<i32> {
        let mut version = 0;
        call!(self, "cuDriverGetVersion", (&raw mut version => *mut c_int)).ok()?;
        Some(version)
    }

    /// GPUs that it may use, each with the name that NVML gives it too. `CUDA_VISIBLE_DEVICES` may hide and reorder them.
    ///
    /// # Errors
    /// What the library answered.
    pub(crate) fn devices(self) -> Result<Vec<(c_int, String)>, String> {
        let mut count = 0;
        call!(self, "cuDeviceGetCount", (&raw mut count => *mut c_int))?;
        (0..count)
            .map(|ordinal| {
                let mut device = 0;
                call!(self, "cuDeviceGet", (&raw mut device => *mut c_int, ordinal => c_int))?;
                let mut id = [0_u8; 16];
                call!(self, "cuDeviceGetUuid", (&raw mut id => *mut [u8; 16], device => c_int))?;
                Ok((device, uuid(id)))
            })
            .collect()
    }

    /// A context on the GPU, and as much memory on either side as one copy moves: the host's is pinned, so that nothing is staged.
    ///
    /// # Errors
    /// What the library answered.
    pub(crate) fn room(self, device: c_int, bytes: usize) -> Result<Room, String> {
        let mut room =
            Room { cuda: self, bytes, context: std::ptr::null_mut(), host: std::ptr::null_mut(), gpu: 0 };
        let context = &raw mut room.context;
        call!(self, "cuCtxCreate_v2", (context => *mut *mut c_void, 0 => c_uint, device => c_int))?;
        call!(self, "cuMemAlloc_v2", (&raw mut room.gpu => *mut u64, bytes => usize))?;
        call!(self, "cuMemAllocHost_v2", (&raw mut room.host => *mut *mut c_void, bytes => usize))?;
        if room.host.is_null() {
            return Err("cuMemAllocHost_v2 gave no memory".to_owned());
        }
        Ok(room)
    }
}

/// `GPU-` and the id, as NVML writes it.
fn uuid(id: [u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(id));
    let mut parts = Vec::new();
    let mut rest = digits.as_str();
    for length in [8, 4, 4, 4, 12] {
        let (part, behind) = rest.split_at(length);
        parts.push(part);
        rest = behind;
    }
    format!("GPU-{}", parts.join("-"))
}

/// Memory of the same size on either side.
pub(crate) struct Room {
    cuda: Cuda,
    bytes: usize,
    context: *mut c_void,
    host: *mut c_void,
    gpu: u64,
}

impl Room {
    /// How much one copy moves.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies all of it; comes back when it has arrived.
    ///
    /// # Errors
    /// What the library answered.
    pub(crate) fn copy(&self, way: Way) -> Result<(), String> {
        let (host, gpu, bytes) = (self.host, self.gpu, self.bytes);
        match way {
            Way::ToGpu => {
                call!(self.cuda, "cuMemcpyHtoD_v2", (gpu => u64, host.cast_const() => *const c_void, bytes => usize))?;
            }
            Way::FromGpu => {
                call!(self.cuda, "cuMemcpyDtoH_v2", (host => *mut c_void, gpu => u64, bytes => usize))?;
            }
        }
        call!(self.cuda, "cuCtxSynchronize", ())
    }

    /// Whether what is copied there and back is what it was: that anything is copied at all.
    ///
    /// # Errors
    /// What the library answered.
    pub(crate) fn copies(&mut self) -> Result<bool, String> {
        let pattern = |n: usize| n.wrapping_mul(31).to_le_bytes()[0];
        self.host().iter_mut().enumerate().for_each(|(n, byte)| *byte = pattern(n));
        self.copy(Way::ToGpu)?;
        self.host().fill(0);
        self.copy(Way::FromGpu)?;
        Ok(self.host().iter().enumerate().all(|(n, byte)| *byte == pattern(n)))
    }

    fn host(&mut self) -> &mut [u8] {
        // SAFETY: the library gave so many bytes of host memory, which are nobody else's until they are given back.
        unsafe { std::slice::from_raw_parts_mut(self.host.cast(), self.bytes) }
    }
}

impl Drop for Room {
    /// What was made is given back; there is nobody to tell an error to.
    fn drop(&mut self) {
        if !self.host.is_null() {
            let _: Result<(), String> = call!(self.cuda, "cuMemFreeHost", (self.host => *mut c_void));
        }
        if self.gpu != 0 {
            let _: Result<(), String> = call!(self.cuda, "cuMemFree_v2", (self.gpu => u64));
        }
        if !self.context.is_null() {
            let _: Result<(), String> = call!(self.cuda, "cuCtxDestroy_v2", (self.context => *mut c_void));
        }
    }
}
