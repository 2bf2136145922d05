//! Asking the kernel where sockets stand: a table of their cookies, and a walk over the open files of the processes that
//! use watched sockets.
//!
//! A file costs the kernel about half a microsecond, so the walk spares processes that have nothing to do with it.

use std::io::Read as _;
use std::os::fd::AsFd as _;

use aya::Ebpf;
use aya::maps::{HashMap, MapData};
use roomtrace_common::ASKED;

use super::error::KernelError;
use super::object::{self, chain, map};
use super::sys;
use crate::event::{Event, SocketId, TaskChange};

/// How many processes are walked one by one; with more of them, all of the host are.
const PROCESSES: usize = 64;

/// What is needed for it.
pub(super) struct Ask {
    /// Cookies asked for; the program takes out those that it has answered.
    asked: HashMap<MapData, u64, u32>,
    users: Users,
}

impl Ask {
    pub(super) fn new(asked: HashMap<MapData, u64, u32>) -> Self {
        Self { asked, users: Users::default() }
    }

    /// Remembers which process uses a watched socket.
    pub(super) fn note(&mut self, event: &Event<'_>) {
        match event {
            Event::Socket(event) => event.task.iter().for_each(|task| self.users.add(task.tgid)),
            Event::Carried(told) => self.users.add(told.process),
            Event::Task(event) => {
                let TaskChange::Exited { process, .. } = event.what;
                if process {
                    self.users.remove(event.task.tgid);
                }
            }
        }
    }

    /// Asks for at most [`ASKED`] sockets: the answers are in the ring afterwards.
    pub(super) fn ask(&mut self, ebpf: &mut Ebpf, sockets: &[SocketId]) -> Result<(), KernelError> {
        let sockets = sockets.get(..ASKED).unwrap_or(sockets);
        if sockets.is_empty() {
            return Ok(());
        }
        let asked = sockets.iter().try_for_each(|socket| self.asked.insert(socket.0, 1, 0));
        let walked = asked
            .map_err(|e| KernelError::Map { map: map::ASKED, action: "update", why: chain(&e) })
            .and_then(|()| self.walk(ebpf, object::ASK));
        for socket in sockets {
            // Mostly the program has taken it out: nothing to tell.
            let _ = self.asked.remove(&socket.0);
        }
        walked
    }

    /// Runs one of the programs that walk over the open files of those processes.
    pub(super) fn walk(&mut self, ebpf: &mut Ebpf, name: &str) -> Result<(), KernelError> {
        let Some(processes) = self.users.living() else {
            return object::walk(ebpf, name);
        };
        let failed = |why: String| KernelError::Search { why };
        let program = object::iterator(ebpf, name)?;
        let program = program.fd().map_err(|e| failed(chain(&e)))?.as_fd();
        for process in processes {
            let files = sys::iterate_process(program, *process).and_then(|link| sys::iterator(link.as_fd()));
            let mut files = files.map_err(|e| failed(e.to_string()))?;
            files.read_to_end(&mut Vec::new()).map_err(|e| failed(e.to_string()))?;
        }
        Ok(())
    }
}

/// Processes that use watched sockets, as far as events named them.
#[derive(Default)]
struct Users {
    /// The last one, which mostly is the next one too.
    last: u32,
    all: Vec<u32>,
    /// There were more than [`PROCESSES`] at once, so one of them is not remembered.
    too_many: bool,
}

impl Users {
    fn add(&mut self, process: u32) {
        if process == self.last {
            return;
        }
        self.last = process;
        if self.all.contains(&process) {
            return;
        }
        if self.all.len() >= PROCESSES {
            self.all.retain(|p| sys::lives(*p));
        }
        if self.all.len() >= PROCESSES {
            self.too_many = true;
        } else {
            self.all.push(process);
        }
    }

    fn remove(&mut self, process: u32) {
        self.all.retain(|p| *p != process);
        self.last = 0;
    }

    /// Those that still live; `None`: there were too many.
    fn living(&mut self) -> Option<&[u32]> {
        self.all.retain(|p| sys::lives(*p));
        (!self.too_many).then_some(&self.all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dead_make_room_and_too_many_that_live_are_all_processes() {
        let mut users = Users::default();
        // No process has such a number (`PID_MAX_LIMIT` is 4 194 304, include/linux/threads.h).
        for process in 5_000_000..5_000_200 {
            users.add(process);
        }
        assert!(users.all.len() <= PROCESSES);
        let own = std::process::id();
        users.add(own);
        users.add(1);
        users.add(own);
        assert_eq!(users.living().map(<[u32]>::to_vec), Some(vec![own, 1]));
        users.remove(own);
        assert_eq!(users.living().map(<[u32]>::to_vec), Some(vec![1]));
        users.all = vec![1; PROCESSES];
        users.add(own);
        assert_eq!(users.living(), None, "one of them could not be remembered");
    }
}
