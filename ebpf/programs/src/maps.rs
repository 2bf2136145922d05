//! Everything the programs keep, each of it bounded, and the counters of what they turn away.

use core::ffi::c_void;
use core::ptr;

use aya_ebpf::helpers::generated as g;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{HashMap, LruHashMap, PerCpuArray, RingBuf};
use roomtrace_common::{
    ASKED as MOST_ASKED, COST_SLOTS, Cost, Endpoint, MUTED_SLOTS, Settings, Socket, counter, mark, program,
    state,
};

use crate::kernel::Sock;

/// Set by user space before loading; constant afterwards, so that the verifier knows the numbers.
#[unsafe(no_mangle)]
pub static SETTINGS: Settings = unsafe { core::mem::zeroed() };

/// A constant of [`SETTINGS`]. The volatile read keeps the compiler from believing the zero in the object.
macro_rules! setting {
    ($($field:tt)+) => { unsafe { core::ptr::read_volatile(&raw const $crate::maps::SETTINGS.$($field)+) } };
}
pub(crate) use setting;

/// Records for user space; its size is set when loading.
#[map]
pub static EVENTS: RingBuf = RingBuf::with_byte_size(8 << 20, 0);

/// See [`counter`].
#[map]
pub static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(counter::COUNT, 0);

/// Own cost, a slot for each CPU. A global and not a map: it needs no look-up.
#[unsafe(no_mangle)]
pub static mut COSTS: [[Cost; program::COUNT]; COST_SLOTS] =
    [[Cost { runs: 0, sampled: 0, nanos: 0, pad: 0 }; program::COUNT]; COST_SLOTS];

/// Sockets whose HTTP answer is muted, and in which direction: the cheapest look-up there is, because a socket's storage
/// costs more than a muted call may. A section of its own, so that [`COSTS`] stays alone in its.
#[unsafe(no_mangle)]
#[unsafe(link_section = ".bss.muted")]
pub static mut MUTED: [u64; MUTED_SLOTS] = [0; MUTED_SLOTS];

/// User space's answers by cookie. Least recently used: an answer for a socket that never calls again goes.
#[map]
pub static JUDGEMENTS: LruHashMap<u64, u32> = LruHashMap::with_max_entries(16384, 0);

/// Endpoints to which connect attempts are reported.
#[map]
pub static ENDPOINTS: HashMap<Endpoint, u32> = HashMap::with_max_entries(4096, 0);

/// Cookies of the sockets of which user space wants to know where they stand.
#[map]
pub static ASKED: HashMap<u64, u32> = HashMap::with_max_entries(MOST_ASKED as u32, 0);

/// Ports that are followed whoever owns them.
#[map]
pub static PORTS: HashMap<u16, u32> = HashMap::with_max_entries(64, 0);

/// Processes that user space counts among the engines, by process id.
#[map]
pub static PROCESSES: HashMap<u32, u32> = HashMap::with_max_entries(1024, 0);

/// Socket storage, freed with its socket. Written out because aya's type takes only `cgroup/sock_addr` contexts
/// and has no `BPF_F_CLONE` (what a listener is marked with passes to the sockets it accepts).
#[repr(C)]
struct SocketStorage {
    r#type: *const [i32; 24], // BPF_MAP_TYPE_SK_STORAGE
    key: *const i32,
    value: *const Socket,
    max_entries: *const [i32; 0],
    map_flags: *const [i32; 1 | 512], // BPF_F_NO_PREALLOC | BPF_F_CLONE
}
unsafe impl Sync for SocketStorage {}

#[unsafe(link_section = ".maps")]
#[unsafe(export_name = "SOCKETS")]
static SOCKETS: SocketStorage = SocketStorage {
    r#type: ptr::null(),
    key: ptr::null(),
    value: ptr::null(),
    max_entries: ptr::null(),
    map_flags: ptr::null(),
};

fn sockets() -> *mut c_void {
    (&raw const SOCKETS).cast_mut().cast()
}

/// What is remembered of `sk`; null: nothing.
#[inline(always)]
pub unsafe fn known(sk: Sock) -> *mut Socket {
    if sk.has_storage() { stored(sk) } else { ptr::null_mut() }
}

/// As [`known`], of a socket that has some storage.
#[inline(always)]
pub unsafe fn stored(sk: Sock) -> *mut Socket {
    g::bpf_sk_storage_get(sockets(), sk.0.cast_mut().cast(), ptr::null_mut(), 0).cast()
}

/// As [`known`], but begins to remember it. Null, and counted, if the kernel refuses.
#[inline(always)]
pub unsafe fn remember(sk: Sock) -> *mut Socket {
    const CREATE: u64 = 1; // BPF_SK_STORAGE_GET_F_CREATE
    let socket = g::bpf_sk_storage_get(sockets(), sk.0.cast_mut().cast(), ptr::null_mut(), CREATE);
    if socket.is_null() {
        count(counter::STORAGE_REFUSED);
    }
    socket.cast()
}

/// Forgets `sk`, for the reason that `why` counts.
#[inline(always)]
pub unsafe fn forget(sk: Sock, socket: *mut Socket, why: u32) {
    count(why);
    leave(socket);
    g::bpf_sk_storage_delete(sockets(), sk.0.cast_mut().cast());
}

/// Follows `sk` no longer, for the reason that `why` counts. One of an engine process is remembered for what it carries.
#[inline(always)]
pub unsafe fn put_aside(sk: Sock, socket: *mut Socket, why: u32) {
    let carries = setting!(carriers) != 0
        && (*socket).state == state::PENDING
        && (*socket).flags & (mark::OURS | mark::CLOSED) == mark::OURS;
    if carries {
        count(why);
        enter(socket, state::CARRIER);
    } else {
        forget(sk, socket, why);
    }
}

/// Moves a socket to another state, keeping the numbers of both.
#[inline(always)]
pub unsafe fn enter(socket: *mut Socket, new: u32) {
    leave(socket);
    (*socket).flags &= !mark::CLOSED;
    (*socket).state = new;
    count(counter::ENTERED + (new & 7));
}

/// Takes a socket out of the number of open ones.
#[inline(always)]
pub unsafe fn leave(socket: *mut Socket) {
    let old = (*socket).state;
    if old != state::NONE && (*socket).flags & mark::CLOSED == 0 {
        (*socket).flags |= mark::CLOSED;
        count(counter::LEFT + (old & 7));
    }
}

/// Adds one to this CPU's part of a counter; what it is then.
#[inline(always)]
pub fn count(index: u32) -> u64 {
    match COUNTERS.get_ptr_mut(index) {
        Some(value) => unsafe {
            *value += 1;
            *value
        },
        None => 0,
    }
}
