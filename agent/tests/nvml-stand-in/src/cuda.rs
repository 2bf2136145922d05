//! The few functions of the CUDA driver's library (`cuda.h` 13) that copy between host and GPU. What they copy moves the counters of
//! the same script's GPUs, so that whoever copies a known number of bytes can ask whether they were counted.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::time::Duration;

use crate::{call, with};

type Result = c_int;
const INVALID_VALUE: Result = 1;
const OUT_OF_MEMORY: Result = 2;

/// Bytes that a copy moves before the counters show them.
const SLICE: usize = 1 << 20;

fn cu(function: &str, gpu: Option<usize>, act: impl FnOnce(&mut crate::script::Script) -> Result) -> Result {
    call(function, gpu, |s| act(s).cast_unsigned()).cast_signed()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> Result {
    cu("cuInit", None, |_| 0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Result {
    cu("cuDriverGetVersion", None, |_| unsafe {
        *version = 13_000;
        0
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: Result, name: *mut *const c_char) -> Result {
    let known = match code {
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        100 => c"CUDA_ERROR_NO_DEVICE",
        _ => return INVALID_VALUE,
    };
    unsafe { *name = known.as_ptr() };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Result {
    cu("cuDeviceGetCount", None, |s| unsafe {
        *count = s.gpus() as c_int;
        0
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Result {
    // Numbered the other way round than NVML does: only the name tells which is which.
    cu("cuDeviceGet", None, |s| unsafe {
        *device = s.gpus() as c_int - 1 - ordinal;
        0
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> Result {
    let gpu = device as usize;
    cu("cuDeviceGetUuid", Some(gpu), |s| unsafe {
        let digits: String = s.uuid(gpu).chars().skip(4).filter(char::is_ascii_hexdigit).collect();
        *uuid = u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes();
        0
    })
}

/// One GPU at a time: that of the last context is copied to and from.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxCreate_v2(context: *mut *mut c_void, _flags: c_uint, device: c_int) -> Result {
    cu("cuCtxCreate_v2", Some(device as usize), |s| unsafe {
        s.current = device as usize;
        *context = (device as usize + 0x2000) as *mut c_void;
        0
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy_v2(_context: *mut c_void) -> Result {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Result {
    cu("cuCtxSynchronize", None, |_| 0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(pointer: *mut u64, bytes: usize) -> Result {
    cu("cuMemAlloc_v2", None, |_| unsafe {
        *pointer = Box::into_raw(vec![0_u8; bytes].into_boxed_slice()).cast::<u8>() as u64;
        0
    })
}

/// Few and short-lived: what was given out is kept.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(_pointer: u64) -> Result {
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(pointer: *mut *mut c_void, bytes: usize) -> Result {
    cu("cuMemAllocHost_v2", None, |_| unsafe {
        *pointer = Box::into_raw(vec![0_u8; bytes].into_boxed_slice()).cast();
        0
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(_pointer: *mut c_void) -> Result {
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> Result {
    unsafe { copied("cuMemcpyHtoD_v2", from.cast(), to as *mut u8, bytes, 1) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> Result {
    unsafe { copied("cuMemcpyDtoH_v2", from as *const u8, to.cast(), bytes, 0) }
}

/// Copies, takes the time that the script says, and counts as it goes.
unsafe fn copied(function: &str, from: *const u8, to: *mut u8, bytes: usize, way: usize) -> Result {
    let gpu = with(|s| s.current);
    let code = cu(function, Some(gpu), |_| 0);
    if code != 0 {
        return code;
    }
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    let rate: f64 = with(|s| s.number("copy_rate")).unwrap_or(2.5e10);
    let mut left = bytes;
    while left > 0 {
        let slice = left.min(SLICE);
        std::thread::sleep(Duration::from_secs_f64(slice as f64 / rate));
        with(|s| s.copied(gpu, way, slice));
        left -= slice;
    }
    0
}
