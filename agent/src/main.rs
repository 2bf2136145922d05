//! The one binary: parses the command line, runs a command, turns its end into an exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    roomtrace::cli::main()
}
