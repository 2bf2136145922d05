//! Engines on hosts of their own: network namespaces that somebody has made, with an address each (`--prefill-host`,
//! `--decode-host`). Without them all engines are where the driver is. Needs root.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::str::FromStr;
use std::sync::OnceLock;

use anyhow::{Context, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A network namespace under `/run/netns` and the address that engines have there: `NAME=ADDRESS`.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    name: String,
    /// What engines bind there and tell their peers.
    pub address: IpAddr,
}

impl FromStr for Host {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, address) = text.split_once('=').ok_or("expected NAMESPACE=ADDRESS")?;
        let address = address.parse().map_err(|_| format!("not an IP address: {address}"))?;
        Ok(Self { name: name.to_owned(), address })
    }
}

/// Hosts of prefill and of decode engines.
static HOSTS: OnceLock<[Option<Host>; 2]> = OnceLock::new();

/// Says where engines are to run. Only the first call counts.
pub(crate) fn set(prefill: Option<Host>, decode: Option<Host>) {
    let _ = HOSTS.set([prefill, decode]);
}

/// Where prefill engines run, or decode engines.
pub(crate) fn of(prefill: bool) -> Option<&'static Host> {
    HOSTS.get()?.get(usize::from(!prefill))?.as_ref()
}

/// While it lives, processes that this thread starts are on the host.
pub(crate) struct Inside {
    before: File,
}

impl Host {
    /// Goes there.
    ///
    /// # Errors
    /// When there is no such namespace, or without root.
    pub(crate) fn enter(&self) -> Result<Inside> {
        let path = format!("/run/netns/{}", self.name);
        let before = File::open("/proc/thread-self/ns/net").context("open the own network namespace")?;
        let there = File::open(&path).with_context(|| format!("open {path}"))?;
        move_into_link_name_space(there.as_fd(), Some(LinkNameSpaceType::Network))
            .with_context(|| format!("enter {path}"))?;
        Ok(Inside { before })
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if let Err(error) = move_into_link_name_space(self.before.as_fd(), Some(LinkNameSpaceType::Network)) {
            eprintln!("cannot leave a network namespace again: {error}");
        }
    }
}
