//! Children: started, fed, listened to and ended, without ever blocking the caller for longer than
//! it asked to wait.
//!
//! One supervisor thread owns a current-thread tokio runtime and is the parent of every child, for
//! two reasons: the kernel ends children when the *thread* that started them ends (the workers ask
//! for that), so it must live as long as the process; and everything asynchronous stays in this
//! folder. Outside it, [`Group`] is a plain blocking object.
//!
//! A child's standard input is one end of a socket pair that carries frames, one JSON text a line,
//! both ways; its standard output and error stay free for NCCL's log and are kept, bounded.

mod group;
mod log_tail;
mod replace;
mod supervisor;

pub use group::{ChildEvent, ChildSpec, Exit, Group, read_frame};
pub use log_tail::LogTail;
pub use replace::replace;
pub use supervisor::{Supervisor, SupervisorError};
