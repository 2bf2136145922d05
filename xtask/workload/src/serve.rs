//! An engine for a driver elsewhere: in a pod, or on another host. Takes one connection after the other; the first line says what
//! to start, the rest goes to it and what it says comes back. It ends with the connection.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Command as Process, Stdio};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::rank::PROCESS_VARIABLE;

/// The first line.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    /// Which of the workload's processes.
    pub what: String,
    /// How it is called.
    pub title: String,
    /// Its arguments, for show.
    pub arguments: Vec<String>,
}

/// Serves drivers until it is killed.
///
/// # Errors
/// When the address cannot be had.
pub(crate) fn run(at: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(at).with_context(|| format!("bind {at}"))?;
    eprintln!("waiting for a driver on {at}");
    for driver in listener.incoming() {
        if let Err(error) = driver.context("take a driver's connection").and_then(one) {
            eprintln!("{error:#}");
        }
    }
    Ok(())
}

fn one(driver: TcpStream) -> Result<()> {
    driver.set_nodelay(true)?;
    let mut said = driver.try_clone()?;
    let mut orders = BufReader::new(driver).lines();
    let first = orders.next().context("a driver without orders")??;
    let start: Start = serde_json::from_str(&first).context("the first order")?;
    let mut child = Process::new(std::env::current_exe().context("find this program")?)
        .arg0(&start.title)
        .args(&start.arguments)
        .env(PROCESS_VARIABLE, &start.what)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {}", start.what))?;
    let mut input = child.stdin.take().context("a process without input")?;
    let mut output = child.stdout.take().context("a process without output")?;
    std::thread::spawn(move || std::io::copy(&mut output, &mut said));
    for order in orders.map_while(Result::ok) {
        if writeln!(input, "{order}").is_err() {
            break;
        }
    }
    // Its ranks end with it, and it ends with its input.
    drop(input);
    child.wait().context("wait for the engine")?;
    Ok(())
}
