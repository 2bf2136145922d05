//! JSON lines to a file or to standard output, by a thread of their own.
