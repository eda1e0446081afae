//! What one rank's process finds around it, where that differs from the process that started it:
//! variables, limits, capabilities, namespaces, mounts. A job's ranks may run in containers of their
//! own, under other limits, with other devices visible.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::error::{Error, Result};

/// A namespace of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespace {
    /// Process numbers: the process is number 1 in it.
    Pid,
    /// System V IPC.
    Ipc,
    /// Network, which has the abstract Unix sockets too.
    Net,
    /// Host name; see [`Surroundings::host_name`].
    Uts,
    /// Mounts; see [`Surroundings::mounts`].
    Mount,
}

impl Namespace {
    fn flag(self) -> libc::c_int {
        match self {
            Namespace::Pid => libc::CLONE_NEWPID,
            Namespace::Ipc => libc::CLONE_NEWIPC,
            Namespace::Net => libc::CLONE_NEWNET,
            Namespace::Uts => libc::CLONE_NEWUTS,
            Namespace::Mount => libc::CLONE_NEWNS,
        }
    }
}

/// A mount that only the rank sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mount {
    /// A tmpfs with that many bytes over a folder.
    Tmpfs(PathBuf, u64),
    /// A tmpfs over a folder in which not one file has room.
    Full(PathBuf),
    /// The folder as it is, but not to be written to.
    ReadOnly(PathBuf),
}

/// What is special around one rank's process.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// Variables to set, or with `None` to remove.
    pub env: Vec<(String, Option<String>)>,
    /// The network namespace to be in, as `ip netns` names it.
    pub network: Option<String>,
    /// Namespaces to make.
    pub namespaces: Vec<Namespace>,
    /// The host's name in a UTS namespace.
    pub host_name: Option<String>,
    /// Mounts in a mount namespace.
    pub mounts: Vec<Mount>,
    /// Soft limits, by the numbers of `setrlimit`.
    pub limits: Vec<(u32, u64)>,
    /// Capabilities that the process is not to have.
    pub without_capabilities: Vec<u32>,
}

/// `CAP_IPC_LOCK`: with it, no limit of locked memory counts.
pub const CAP_IPC_LOCK: u32 = 14;

/// What [`Surroundings::enter`] needs, made before the fork.
struct Prepared {
    network: Option<OwnedFd>,
    flags: libc::c_int,
    host_name: Option<CString>,
    mounts: Vec<(CString, Option<CString>)>,
    limits: Vec<(u32, u64)>,
    without_capabilities: Vec<u32>,
}

fn c_path(p: &Path) -> io::Result<CString> {
    use std::os::unix::ffi::OsStrExt;
    CString::new(p.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn must(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn mount(
    source: &CStr,
    target: &CStr,
    kind: &CStr,
    flags: libc::c_ulong,
    data: Option<&CStr>,
) -> io::Result<()> {
    // SAFETY: all texts end in NUL and live through the call; the data may be NULL.
    must(unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            flags,
            data.map_or(std::ptr::null(), |d| d.as_ptr().cast()),
        )
    })
}

impl Prepared {
    /// Runs in the child between fork and exec: system calls only, no allocation.
    fn enter(&self) -> io::Result<()> {
        for (resource, soft) in &self.limits {
            let mut limit = libc::rlimit {
                rlim_cur: 0,
                rlim_max: 0,
            };
            // SAFETY: `limit` is a place for the limits.
            must(unsafe { libc::getrlimit(*resource, &mut limit) })?;
            limit.rlim_cur = (*soft).min(limit.rlim_max);
            // SAFETY: a valid pair: the soft limit is not above the hard one.
            must(unsafe { libc::setrlimit(*resource, &limit) })?;
        }
        if let Some(network) = &self.network {
            // SAFETY: takes an open file and flags only.
            must(unsafe { libc::setns(network.as_raw_fd(), libc::CLONE_NEWNET) })?;
        }
        if self.flags != 0 {
            // SAFETY: takes flags only.
            must(unsafe { libc::unshare(self.flags) })?;
        }
        if let Some(name) = &self.host_name {
            // SAFETY: the text has the length that is passed.
            must(unsafe { libc::sethostname(name.as_ptr(), name.as_bytes().len()) })?;
        }
        if !self.mounts.is_empty() || self.network.is_some() {
            // Nothing of what follows is to reach the namespace that we come from.
            let private = libc::MS_REC | libc::MS_PRIVATE;
            mount(c"none", c"/", c"none", private, None)?;
        }
        if self.network.is_some() {
            // A sysfs shows the devices of the network namespace that it was mounted in.
            // SAFETY: the text ends in NUL.
            must(unsafe { libc::umount2(c"/sys".as_ptr(), libc::MNT_DETACH) })?;
            mount(c"none", c"/sys", c"sysfs", 0, None)?;
        }
        for (path, tmpfs) in &self.mounts {
            match tmpfs {
                Some(size) => mount(c"tmpfs", path, c"tmpfs", 0, Some(size))?,
                None => {
                    mount(path, path, c"none", libc::MS_BIND, None)?;
                    let again = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY;
                    mount(path, path, c"none", again, None)?;
                }
            }
        }
        for cap in &self.without_capabilities {
            // SAFETY: takes numbers only.
            must(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, *cap as libc::c_ulong, 0, 0, 0) })?;
        }
        Ok(())
    }
}

impl Surroundings {
    /// Namespaces of these kinds.
    pub fn with_namespaces(namespaces: &[Namespace]) -> Surroundings {
        Surroundings {
            namespaces: namespaces.to_vec(),
            ..Surroundings::default()
        }
    }

    /// The network namespace of that name.
    pub fn in_network(name: &str) -> Surroundings {
        Surroundings {
            network: Some(name.to_string()),
            ..Surroundings::default()
        }
    }

    /// Adds a variable.
    pub fn with_env(mut self, name: &str, value: &str) -> Surroundings {
        self.env.push((name.into(), Some(value.into())));
        self
    }

    fn prepare(&self) -> io::Result<Prepared> {
        let text =
            |s: &str| CString::new(s).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
        let mounts = self.mounts.iter().map(|m| match m {
            Mount::Tmpfs(path, bytes) => {
                io::Result::Ok((c_path(path)?, Some(text(&format!("size={bytes}"))?)))
            }
            // The one inode is the folder's own.
            Mount::Full(path) => Ok((c_path(path)?, Some(text("size=4096,nr_inodes=1")?))),
            Mount::ReadOnly(path) => Ok((c_path(path)?, None)),
        });
        let open = |name: &String| File::open(Path::new("/run/netns").join(name));
        let network = self.network.as_ref().map(open).transpose()?;
        let network = network.map(OwnedFd::from);
        let own_mounts = network.as_ref().map_or(0, |_| libc::CLONE_NEWNS);
        Ok(Prepared {
            // Who makes a PID namespace stays outside: that is for the thread that starts the child.
            flags: self
                .namespaces
                .iter()
                .filter(|n| **n != Namespace::Pid)
                .fold(own_mounts, |all, n| all | n.flag()),
            network,
            host_name: self.host_name.as_deref().map(text).transpose()?,
            mounts: mounts.collect::<io::Result<_>>()?,
            limits: self.limits.clone(),
            without_capabilities: self.without_capabilities.clone(),
        })
    }

    /// Starts a program in these surroundings.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        for (name, value) in &self.env {
            match value {
                Some(v) => command.env(name, v),
                None => command.env_remove(name),
            };
        }
        let prepared = self.prepare()?;
        // SAFETY: the closure makes system calls only: it takes no lock and allocates nothing.
        unsafe { command.pre_exec(move || prepared.enter()) };
        if !self.namespaces.contains(&Namespace::Pid) {
            return command.spawn();
        }
        // A PID namespace is for the children of the thread that made it: a thread of its own, so
        // that no later child of this process gets there.
        std::thread::scope(|s| {
            s.spawn(|| {
                // SAFETY: takes flags only; concerns this thread's children.
                must(unsafe { libc::unshare(libc::CLONE_NEWPID) })?;
                command.spawn()
            })
            .join()
            .expect("starting a child does not panic")
        })
    }

    /// Whether this process may make them; the error says why not.
    pub fn possible(&self) -> Result<()> {
        let mut command = Command::new("/bin/true");
        command.stdin(Stdio::null());
        let status = self
            .spawn(&mut command)
            .and_then(|mut c| c.wait())
            .map_err(|e| Error::new(format!("{:?} cannot be made here: {e}", self.namespaces)))?;
        if !status.success() {
            return Err(Error::new(format!(
                "a program in {:?} ended with {status}",
                self.namespaces
            )));
        }
        Ok(())
    }
}
