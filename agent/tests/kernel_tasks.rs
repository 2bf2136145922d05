//! What the kernel says beside the bytes: threads of engine processes that end, TCP's own trouble with watched sockets,
//! and where a socket stands when it is asked for.
//!
//! Other processes of the host end and talk at the same time: each test looks only at the processes and sockets that it
//! made.
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::undocumented_unsafe_blocks,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "tests, with processes and socket options of which the standard library knows nothing"
)]

#[path = "support/live.rs"]
mod live;

use std::ffi::CString;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use live::{Kept, Live, Pair, shared as start};
use roomtrace::event::{SocketId, Stand, TaskChange, TaskEvent, TcpState, Trouble};

/// A process of its own whose one thread has this name; it runs `body`, then ends with status 0.
struct Child(libc::pid_t);

impl Child {
    fn named(name: &str, body: impl FnOnce()) -> Self {
        let name = CString::new(name).unwrap();
        match unsafe { libc::fork() } {
            0 => {
                unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
                if std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_err() {
                    unsafe { libc::_exit(101) };
                }
                unsafe { libc::_exit(0) };
            }
            pid => {
                assert!(pid > 0, "{}", std::io::Error::last_os_error());
                Self(pid)
            }
        }
    }

    const fn pid(&self) -> u32 {
        self.0 as u32
    }

    /// Until it has ended; it stays a zombie.
    fn wait(&self) {
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let how = libc::WEXITED | libc::WNOWAIT;
        assert_eq!(unsafe { libc::waitid(libc::P_PID, self.pid(), &raw mut info, how) }, 0);
    }

    fn kill(&self) {
        unsafe { libc::kill(self.0, libc::SIGKILL) };
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> std::thread::JoinHandle<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body).unwrap()
}

fn forever() {
    loop {
        std::thread::sleep(Duration::from_mins(1));
    }
}

/// Ends this thread alone, also the first one of the process.
fn end_thread(status: i32) {
    unsafe { libc::syscall(libc::SYS_exit, status) };
}

fn of(live: &Live, child: &Child) -> Vec<TaskEvent> {
    live.tasks.iter().filter(|e| e.task.tgid == child.pid()).copied().collect()
}

/// Takes events until there are `n` of this process or a generous time has passed.
fn ends(live: &mut Live, child: &Child, n: usize) -> Vec<TaskEvent> {
    let end = Instant::now() + Duration::from_mins(1);
    while of(live, child).len() < n && Instant::now() < end {
        live.drain();
        live.capture.wait(Duration::from_millis(5)).unwrap();
    }
    let all = of(live, child);
    assert_eq!(all.len(), n, "{all:#?}");
    all
}

fn name(event: &TaskEvent) -> String {
    event.name.to_text()
}

#[test]
fn nothing_that_this_kernel_has_is_missing() {
    let Some(live) = start() else { return };
    assert_eq!(live.capture.missing(), &[]);
}

#[test]
fn a_thread_that_returns_while_its_process_lives_is_told_with_both_names() {
    let Some(mut live) = start() else { return };
    let child = Child::named("sglang::x", || {
        thread("transfer-7", || ()).join().unwrap();
        forever();
    });
    let told = ends(&mut live, &child, 1)[0];
    assert_eq!(name(&told), "transfer-7");
    assert_eq!(told.task.comm.to_text(), "sglang::x");
    assert_ne!(told.task.tid, child.pid(), "another thread than the first");
    assert_eq!(told.what, TaskChange::Exited { code: 0, process: false });
    assert_ne!(told.task.cgroup, 0, "{told:?}");
    assert_eq!(unsafe { libc::kill(child.0, 0) }, 0, "the process lives");
    // Then the process is killed: its end is told, with the signal.
    child.kill();
    let last = ends(&mut live, &child, 2)[1];
    assert_eq!((last.task.tid, name(&last).as_str()), (child.pid(), "sglang::x"));
    assert_eq!(last.what, TaskChange::Exited { code: 9, process: true });
}

#[test]
fn a_killed_process_is_gone_once_and_every_thread_says_the_signal() {
    let Some(mut live) = start() else { return };
    let child = Child::named("sglang::killed", || {
        for n in 0..3 {
            thread(&format!("receiver-{n}"), forever);
        }
        forever();
    });
    wait_for_threads(&child, 3);
    child.kill();
    let all = ends(&mut live, &child, 4);
    let gone = |e: &&TaskEvent| e.what == TaskChange::Exited { code: 9, process: true };
    let one = |e: &&TaskEvent| e.what == TaskChange::Exited { code: 9, process: false };
    assert_eq!((all.iter().filter(gone).count(), all.iter().filter(one).count()), (1, 3), "{all:#?}");
    assert!(all.iter().all(|e| e.task.comm.to_text() == "sglang::killed"), "{all:#?}");
    let mut names: Vec<_> = all.iter().map(name).collect();
    names.sort();
    assert_eq!(names, ["receiver-0", "receiver-1", "receiver-2", "sglang::killed"]);
}

/// Waits until `n` threads have taken their names.
fn wait_for_threads(child: &Child, n: usize) {
    let named = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", child.pid())).unwrap();
        let names = tasks.filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok());
        names.filter(|name| name.starts_with("receiver-")).count()
    };
    let end = Instant::now() + Duration::from_mins(1);
    while named() < n && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(named(), n);
}

#[test]
fn a_first_thread_that_ends_before_the_others_leaves_them_its_name() {
    let Some(mut live) = start() else { return };
    let child = Child::named("sglang::leader", || {
        thread("late", || {
            // Until the first one has ended: it stays a zombie as long as others live.
            let first = format!("/proc/self/task/{}/stat", std::process::id());
            while !std::fs::read_to_string(&first).unwrap().contains(") Z ") {
                std::thread::sleep(Duration::from_millis(1));
            }
            end_thread(3);
        });
        end_thread(0);
    });
    let all = ends(&mut live, &child, 2);
    assert_eq!((all[0].task.tid, all[0].what), (child.pid(), TaskChange::Exited { code: 0, process: false }));
    assert_eq!(name(&all[1]), "late");
    assert_eq!(all[1].task.comm.to_text(), "sglang::leader");
    assert_eq!(all[1].what, TaskChange::Exited { code: 3 << 8, process: true });
}

/// A thread that calls exec takes over the number of the first one, whose end is told, as are those of the others.
#[test]
fn exec_by_a_thread_ends_the_others_and_not_the_process() {
    let Some(mut live) = start() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("sglang::after");
    std::os::unix::fs::symlink("/bin/true", &path).unwrap();
    let path = CString::new(path.to_str().unwrap()).unwrap();
    let child = Child::named("sglang::before", move || {
        thread("caller", move || {
            let arguments = [path.as_ptr(), std::ptr::null()];
            unsafe { libc::execv(path.as_ptr(), arguments.as_ptr()) };
        });
        forever();
    });
    let all = ends(&mut live, &child, 2);
    assert!(all.iter().all(|e| e.task.tid == child.pid()), "{all:#?}");
    assert_eq!(name(&all[0]), "sglang::before");
    assert_eq!(all[0].what, TaskChange::Exited { code: 0, process: false });
    assert_eq!(name(&all[1]), "sglang::after");
    assert_eq!(all[1].what, TaskChange::Exited { code: 0, process: true });
}

#[test]
fn threads_of_other_processes_are_not_told_and_hundreds_of_an_engine_are() {
    let Some(mut live) = start() else { return };
    let pool = || {
        for n in 0..300 {
            thread(&format!("pool-{n}"), || ()).join().unwrap();
        }
    };
    let other = Child::named("not-an-engine", pool);
    other.wait();
    let engine = Child::named("sglang::pool", pool);
    ends(&mut live, &engine, 301);
    assert_eq!(of(&live, &other), []);
}

/// Drops all that arrives at this socket (`SO_ATTACH_FILTER` with the one instruction `ret 0`), as a black hole on the way
/// would; or no longer.
fn black_hole(socket: &TcpStream, on: bool) {
    let mut drop_all = [libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 }];
    let program = libc::sock_fprog { len: 1, filter: drop_all.as_mut_ptr() };
    let option = if on { libc::SO_ATTACH_FILTER } else { libc::SO_DETACH_FILTER };
    set(socket, option, &program);
}

/// Closing sends a reset.
fn linger_zero(socket: &TcpStream) {
    set(socket, libc::SO_LINGER, &libc::linger { l_onoff: 1, l_linger: 0 });
}

fn set<T>(socket: &TcpStream, option: libc::c_int, value: &T) {
    set_at(socket, libc::SOL_SOCKET, option, value);
}

fn set_at<T>(socket: &impl AsRawFd, level: libc::c_int, option: libc::c_int, value: &T) {
    let (at, size) = (std::ptr::from_ref(value).cast(), size_of::<T>() as u32);
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, at, size) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// The two sockets of a pair, client's first.
fn both(live: &mut Live, pair: &Pair) -> (SocketId, SocketId) {
    live.drain();
    let (local, peer) = pair.addresses();
    (live.socket(local, peer).unwrap(), live.socket(peer, local).unwrap())
}

fn troubles(live: &Live, socket: SocketId) -> Vec<Trouble> {
    live.of(socket).filter_map(|e| if let Kept::Trouble(t) = e.what { Some(t) } else { None }).collect()
}

/// The one answer to a question for this socket. What TCP does to it meanwhile may be told too.
fn stand(live: &mut Live, socket: SocketId) -> Option<Stand> {
    live.drain();
    let before = live.events.len();
    live.capture.ask(&[socket]).unwrap();
    live.drain();
    let by_tcp = |e: &&live::Seen| matches!(e.what, Kept::Trouble(_) | Kept::State(_));
    let told: Vec<_> = live.events[before..].iter().filter(|e| e.socket == socket && !by_tcp(e)).collect();
    let stands: Vec<_> =
        told.iter().filter_map(|e| if let Kept::Stand(s) = e.what { Some(s) } else { None }).collect();
    assert!(told.len() == stands.len() && stands.len() <= 1, "nothing but one answer: {told:#?}");
    stands.first().copied()
}

/// The same once all that was sent is acknowledged, which the other end does in its own time.
fn acknowledged(live: &mut Live, socket: SocketId) -> Stand {
    let end = Instant::now() + Duration::from_mins(1);
    loop {
        let stand = stand(live, socket).unwrap();
        if unacknowledged(&stand) == 0 || Instant::now() > end {
            return stand;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

const fn unacknowledged(stand: &Stand) -> u32 {
    stand.sequence.write.wrapping_sub(stand.sequence.una)
}

const fn unread(stand: &Stand) -> u32 {
    stand.sequence.rcv_nxt.wrapping_sub(stand.sequence.copied)
}

#[test]
fn what_falls_into_a_black_hole_is_told_as_sent_again_and_not_acknowledged() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    let (client, server) = both(&mut live, &pair);
    let before = acknowledged(&mut live, client);
    assert_eq!((before.state, unacknowledged(&before)), (TcpState::Established, 0));
    black_hole(&pair.server, true);
    pair.send(b"STATUS");
    assert!(live.until(|events| {
        events.iter().filter(|e| e.socket == client && matches!(e.what, Kept::Trouble(_))).count() >= 2
    }));
    let (una, write) = (before.sequence.write, before.sequence.write.wrapping_add(6));
    let all = troubles(&live, client);
    assert!(all.iter().all(|t| *t == Trouble::Retransmitted { una, write }), "{all:?}");
    let now = stand(&mut live, client).unwrap();
    assert_eq!((unacknowledged(&now), now.sent, now.sequence.una), (6, write, una));
    assert!(now.retransmits >= 1, "{now:?}");
    assert_eq!(unread(&stand(&mut live, server).unwrap()), 0, "nothing has arrived");
    // It arrives once the way is open, and all is well.
    black_hole(&pair.server, false);
    pair.read(6);
    let after = acknowledged(&mut live, client);
    assert_eq!((unacknowledged(&after), after.retransmits), (0, 0), "{after:?}");
    assert_eq!(troubles(&live, server), []);
}

/// When the way is open again, TCP repairs what was lost at one go: that is one trouble and not one for each segment.
#[test]
fn a_repair_of_many_segments_is_told_once_and_the_rest_is_counted() {
    let Some(mut live) = start() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // Segments of at most 1000 bytes, so that each write is one that cannot be joined with the next.
    let size: libc::c_int = 1000;
    set_at(&listener, libc::IPPROTO_TCP, libc::TCP_MAXSEG, &size);
    let mut pair = Pair::on(&listener);
    let (client, _) = both(&mut live, &pair);
    let merged = |live: &Live| live.capture.counters().unwrap().retransmissions_merged;
    let before = merged(&live);
    black_hole(&pair.server, true);
    for _ in 0..8 {
        pair.send(&[b'x'; 900]);
    }
    assert!(
        live.until(|events| {
            events.iter().any(|e| e.socket == client && matches!(e.what, Kept::Trouble(_)))
        })
    );
    black_hole(&pair.server, false);
    pair.read(8 * 900);
    live.drain();
    let (told, left_out) = (troubles(&live, client).len(), merged(&live) - before);
    assert!(left_out >= 3 && told <= 5, "{told} told, {left_out} left out");
}

#[test]
fn a_reset_is_told_at_the_end_that_sends_it_and_at_the_one_that_gets_it() {
    let Some(mut live) = start() else { return };
    let pair = Pair::new("127.0.0.1");
    let (client, server) = both(&mut live, &pair);
    linger_zero(&pair.client);
    drop(pair.client);
    assert!(live.until(|events| {
        let has = |socket| events.iter().any(|e| e.socket == socket && matches!(e.what, Kept::Trouble(_)));
        has(client) && has(server)
    }));
    assert_eq!(troubles(&live, client), [Trouble::ResetSent]);
    assert_eq!(troubles(&live, server), [Trouble::ResetReceived]);
}

/// The kernel gives the program no socket at all for a reset that answers a connect to a closed port.
#[test]
fn resets_of_sockets_that_nobody_watches_are_passed_over() {
    let Some(mut live) = start() else { return };
    let runs = |live: &Live| -> u64 {
        live.capture.cost().unwrap().iter().find(|c| c.name == "rt_reset_sent").unwrap().runs
    };
    let before = runs(&live);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let foreign = TcpStream::connect(at).unwrap();
    let accepted = listener.accept().unwrap().0;
    linger_zero(&foreign);
    drop((foreign, accepted, listener));
    TcpStream::connect(at).unwrap_err();
    assert!(runs(&live) >= before + 2, "the program ran");
    live.drain();
    let of_it =
        |e: &&live::Seen| e.addresses.local.port() == at.port() || e.addresses.peer.port() == at.port();
    assert!(!live.events.iter().filter(of_it).any(|e| matches!(e.what, Kept::Trouble(_))));
}

#[test]
fn who_asks_is_told_what_is_unread_and_nothing_of_what_is_gone() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    let bystander = Pair::new("127.0.0.1");
    let (client, server) = both(&mut live, &pair);
    let (other, _) = both(&mut live, &bystander);
    pair.send(b"0123456789");
    // Until it has arrived, which is no receive.
    assert_eq!(pair.server.peek(&mut [0; 10]).unwrap(), 10);
    live.drain();
    live.events.clear();
    let second_descriptor = pair.client.try_clone().unwrap();
    live.capture.ask(&[client, server, client]).unwrap();
    drop(second_descriptor);
    live.drain();
    let stands = |live: &Live, socket| {
        live.of(socket).filter(|e| matches!(e.what, Kept::Stand(_))).cloned().collect::<Vec<_>>()
    };
    assert_eq!((stands(&live, client).len(), stands(&live, server).len()), (1, 1));
    assert_eq!(stands(&live, other).len(), 0, "nobody asked for it");
    let told = &stands(&live, server)[0];
    let (local, peer) = pair.addresses();
    assert_eq!((told.addresses.local, told.addresses.peer), (peer, local));
    let Kept::Stand(of_server) = told.what else { panic!() };
    assert_eq!(
        (of_server.state, unread(&of_server), unacknowledged(&of_server)),
        (TcpState::Established, 10, 0)
    );
    pair.read(4);
    assert_eq!(unread(&stand(&mut live, server).unwrap()), 6);
    let of_client = acknowledged(&mut live, client);
    assert_eq!((unacknowledged(&of_client), unread(&of_client), of_client.retransmits), (0, 0, 0));

    pair.read(6);
    drop(pair);
    let end = Instant::now() + Duration::from_mins(1);
    while stand(&mut live, server).is_some() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(stand(&mut live, server), None, "it is gone");
    assert_eq!(stand(&mut live, SocketId(u64::MAX)), None, "it never was");
    live.capture.ask(&[]).unwrap();
}

#[test]
fn asking_needs_no_more_than_the_two_capabilities_that_are_kept() {
    let Some(mut live) = start() else { return };
    let pair = Pair::new("127.0.0.1");
    let (client, _) = both(&mut live, &pair);
    let live = &mut *live;
    // Capabilities belong to a thread: this one is thrown away afterwards.
    let told = std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            live.capture.drop_privileges(false).unwrap();
            stand(live, client)
        });
        asking.join().unwrap()
    });
    assert_eq!(told.unwrap().state, TcpState::Established);
}

/// What the kernel cannot take yet stays with the sender: the peer does not read.
#[test]
fn bytes_that_have_not_left_are_told_apart_from_those_that_wait_for_the_reader() {
    let Some(mut live) = start() else { return };
    let pair = Pair::new("127.0.0.1");
    let (client, server) = both(&mut live, &pair);
    pair.client.set_nonblocking(true).unwrap();
    let mut sent = 0_u32;
    while let Ok(n) = std::io::Write::write(&mut &pair.client, &[b'x'; 8192]) {
        sent += n as u32;
    }
    let at = |live: &mut Live, socket| stand(live, socket).unwrap();
    let (mut here, mut there) = (at(&mut live, client), at(&mut live, server));
    let end = Instant::now() + Duration::from_mins(1);
    // Until the last acknowledgement is in.
    while here.sequence.una != there.sequence.rcv_nxt && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
        (here, there) = (at(&mut live, client), at(&mut live, server));
    }
    let unsent = here.sequence.write.wrapping_sub(here.sent);
    assert!(unsent > 0 && unread(&there) > 0, "{here:?} {there:?}");
    assert_eq!(unacknowledged(&here) + unread(&there), sent);
}

/// Of this thread, so that a busy machine does not count.
fn processor_time() -> Duration {
    let mut time: libc::timespec = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
#[ignore = "a measurement: run it alone with `--ignored --nocapture`"]
#[allow(clippy::print_stdout, clippy::cast_precision_loss, reason = "prints its figures")]
fn what_one_question_costs() {
    const ROUNDS: u32 = 20;
    let Some(mut live) = start() else { return };
    let pairs: Vec<Pair> = (0..32).map(|_| Pair::new("127.0.0.1")).collect();
    let sockets: Vec<SocketId> = pairs.iter().flat_map(|p| <[_; 2]>::from(both(&mut live, p))).collect();
    let cost = |live: &Live| live.capture.cost().unwrap().into_iter().find(|c| c.name == "rt_stand").unwrap();
    for extra in [0, 10_000] {
        // Files of this process; those of others are not looked at.
        let files: Vec<_> = (0..extra).map_while(|_| std::fs::File::open("/dev/null").ok()).collect();
        let (before, begun) = (cost(&live), processor_time());
        for _ in 0..ROUNDS {
            live.capture.ask(&sockets).unwrap();
            live.drain();
        }
        let (after, took) = (cost(&live), processor_time().saturating_sub(begun));
        let runs = (after.runs - before.runs) / u64::from(ROUNDS);
        let seconds = after.sampled_seconds - before.sampled_seconds;
        let each = seconds * 1e9 / (after.samples - before.samples) as f64;
        println!(
            "{} extra files: {runs} files seen, {each:.0} ns of the program each, {:?} of this thread a question of 64",
            files.len(),
            took / ROUNDS
        );
    }
}
