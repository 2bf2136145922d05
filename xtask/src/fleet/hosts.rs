//! Two hosts on one machine: network namespaces on a bridge, each with a machine id of its own. Everything goes away with
//! [`Network`].

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::install::{output, run};

/// A host with an agent and a Collector of its own.
pub(super) struct Host {
    /// Of its network namespace.
    pub(super) name: String,
    pub(super) address: IpAddr,
    /// `host.id` of what its agent sends.
    pub(super) id: String,
    id_file: PathBuf,
}

/// Bridge and hosts. The gateways and the stores are where this process is, at [`Network::here`].
pub(super) struct Network {
    bridge: String,
    /// This process's address on the bridge.
    pub(super) here: IpAddr,
    pub(super) prefill: Host,
    pub(super) decode: Host,
}

impl Network {
    /// Makes it; `dir` takes the machine ids.
    pub(super) fn new(dir: &Path) -> Result<Self> {
        // Another run on this machine has another process id, hence, mostly, other names and addresses.
        let own = std::process::id();
        let net = u8::try_from(own % 250).unwrap_or(0);
        let address = |n| IpAddr::V4(Ipv4Addr::new(10, 197, net, n));
        let host = |role: &str, n: u8| -> Result<Host> {
            let id = format!("{own:024x}{n:08x}");
            let id_file = dir.join(format!("{role}.machine-id"));
            std::fs::write(&id_file, format!("{id}\n")).context("write a machine id")?;
            Ok(Host { name: format!("rt-{role}-{own}"), address: address(n), id, id_file })
        };
        let network = Self {
            bridge: format!("rt{own}"),
            here: address(1),
            prefill: host("prefill", 2)?,
            decode: host("decode", 3)?,
        };
        network.build().context("make two network namespaces on a bridge")?;
        Ok(network)
    }

    fn build(&self) -> Result<()> {
        let bridge = &self.bridge;
        ip(&format!("link add {bridge} type bridge"))?;
        ip(&format!("addr add {}/24 dev {bridge}", self.here))?;
        ip(&format!("link set {bridge} up"))?;
        for (host, n) in [(&self.prefill, 2), (&self.decode, 3)] {
            let (name, outer) = (&host.name, format!("{bridge}v{n}"));
            ip(&format!("netns add {name}"))?;
            ip(&format!("link add {outer} type veth peer name eth0 netns {name}"))?;
            ip(&format!("link set {outer} master {bridge} up"))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link set eth0 up"))?;
            ip(&format!("-n {name} addr add {}/24 dev eth0", host.address))?;
        }
        Ok(())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for command in [
            format!("netns del {}", self.prefill.name),
            format!("netns del {}", self.decode.name),
            format!("link del {}", self.bridge),
        ] {
            // Where making them failed there is nothing to take away.
            let _ = output(Command::new("ip").args(command.split(' ')));
        }
    }
}

impl Host {
    pub(super) fn at(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.address, port)
    }

    /// Begins a command that runs `program` in the host's network. `ip netns exec` would hide the kernel's own file systems.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.name)).arg("--").arg(program);
        command
    }

    /// The same with the host's own machine id.
    pub(super) fn command_as_machine(&self, program: &Path) -> Command {
        let mut command = self.command(Path::new("unshare"));
        command
            .args(["--mount", "sh", "-c", "mount --bind \"$0\" /etc/machine-id && exec \"$@\""])
            .arg(&self.id_file)
            .arg(program)
            .env("NODE_NAME", &self.name);
        command
    }
}

fn ip(arguments: &str) -> Result<()> {
    run(Command::new("ip").args(arguments.split(' ')))
}
