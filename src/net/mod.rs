//! What NCCL asks of a network, once, free of the interface's versions: devices, listeners,
//! connections, registered memory, requests.

mod devices;
pub(crate) mod handle;

use std::collections::HashMap;
use std::ffi::{c_int, CString};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub use self::handle::HANDLE_LEN;
use self::handle::{attempt, set_attempt, Handle, Place, Rdma};
use crate::config;
use crate::config::Transport;
use crate::cuda::Relaxed;
use crate::error::{Error, Result, ResultCode};
use crate::handle::Tagged;
use crate::ibverbs::devices::{LinkLayer, Port};
use crate::proxy::{Proxy, REQUESTS};
use crate::sync::lock;
use crate::transport::tcp::wire::purpose;
use crate::transport::{copy_engine, tcp, verbs, End, RecvEnd, Region, SendEnd};

/// Memory that the CPU can reach, in `ptr_support` and as a kind of memory (`NCCL_PTR_HOST`).
const PTR_HOST: c_int = 1;
/// GPU memory (`NCCL_PTR_CUDA`).
const PTR_CUDA: c_int = 2;

/// The largest message: NCCL reports sizes as `int`, and cuts at 1 GiB where it is not told more.
pub const MAX_MESSAGE: usize = 1 << 30;

/// What NCCL is told of a device.
#[derive(Debug)]
pub struct Properties {
    /// For people.
    pub name: CString,
    /// Where it hangs in /sys; none: off the first CPU.
    pub pci_path: Option<CString>,
    /// The same for all processes of a host, different between hosts.
    pub guid: u64,
    /// A set of `NCCL_PTR_*`.
    pub ptr_support: c_int,
    /// Mbit/s.
    pub speed_mbps: c_int,
    /// Port number, from 1.
    pub port: c_int,
    /// Microseconds.
    pub latency_us: f32,
    /// Connections at a time.
    pub max_comms: c_int,
    /// Receives that one irecv may group.
    pub max_recvs: c_int,
    /// Largest message.
    pub max_p2p_bytes: usize,
    /// Largest message of a collective.
    pub max_coll_bytes: usize,
}

/// Calls of `init` that no `finalize` has answered.
static USERS: AtomicUsize = AtomicUsize::new(0);

/// Starts the plugin, or counts one more user of it.
pub fn init() -> Result<()> {
    // Before anything uses up the process's open files.
    Place::here();
    let config = config::reload();
    for row in config
        .rows()
        .iter()
        .filter(|r| r.source == config::Source::Environment)
    {
        log::info!("{}={} set by the environment", row.name, row.value);
    }
    match crate::cuda::driver() {
        Ok(d) => log::info!(
            "version {}, {} GPUs visible",
            env!("CARGO_PKG_VERSION"),
            d.device_count().unwrap_or(0)
        ),
        Err(why) => {
            log::info!(
                "version {}, host memory only: {why}",
                env!("CARGO_PKG_VERSION")
            )
        }
    }
    let users = USERS.fetch_add(1, Ordering::AcqRel);
    devices::look(&config, users == 0);
    Ok(())
}

/// Counts one user less. What is open stays so until it is closed.
pub fn finalize() -> Result<()> {
    if USERS.fetch_sub(1, Ordering::AcqRel) == 1 {
        prune(Duration::ZERO);
    }
    Ok(())
}

/// How many devices NCCL sees: one for each active RDMA port and each virtual device, or one where there
/// is no RDMA. On each, every connection chooses its own way.
pub fn devices() -> Result<c_int> {
    Ok(devices::count())
}

/// What device `dev` is. Lives as long as the process.
pub fn properties(dev: c_int) -> Result<&'static Properties> {
    Ok(&devices::get(dev)?.properties)
}

/// The devices that `dev` joins: itself, if it is no virtual one.
pub fn members(dev: c_int) -> Result<&'static [c_int]> {
    Ok(&devices::get(dev)?.members)
}

/// Joins devices into a virtual one; its number.
pub fn make_virtual(members: &[c_int]) -> Result<c_int> {
    devices::join(members)
}

/// A listener.
#[derive(Debug)]
pub struct ListenComm {
    // Both always: a connector in another container of this host finds the one only, and which it is
    // cannot be known here.
    local: copy_engine::Listening,
    tcp: Option<tcp::Listening>,
    /// The RDMA ports that connectors may be answered on.
    ports: Vec<Port>,
    /// Those who set up RDMA.
    negotiations: Mutex<Vec<verbs::Negotiation>>,
}

/// One end of a connection, with its requests at an address that does not change.
struct Endpoint<E: ?Sized + 'static> {
    requests: Box<[Tagged<Request>]>,
    proxy: Arc<Proxy<E>>,
    /// Keeps the link thread for as long as there is a connection.
    _service: Link,
}

/// The sending end of a connection.
pub struct SendComm(Endpoint<dyn SendEnd>);

/// The receiving end of a connection.
pub struct RecvComm(Endpoint<dyn RecvEnd>);

/// What keeps the link thread, for an end that needs it.
type Link = Option<Arc<copy_engine::link::Service>>;

impl SendComm {
    fn new(end: Box<dyn SendEnd>, link: Link) -> SendComm {
        SendComm(Endpoint::new(Proxy::new(end), link, Owner::Send))
    }
}

impl RecvComm {
    fn new(end: Box<dyn RecvEnd>, link: Link) -> RecvComm {
        RecvComm(Endpoint::new(Proxy::new(end), link, Owner::Recv))
    }
}

/// Registered memory.
#[derive(Debug)]
pub struct MemoryRegion {
    region: Region,
    /// The end that it is registered with.
    end: usize,
}

#[derive(Clone, Copy, Debug)]
enum Owner {
    Send(*const Proxy<dyn SendEnd>),
    Recv(*const Proxy<dyn RecvEnd>),
}

/// A place for a request in its comm's pool: what NCCL tests.
#[derive(Debug)]
pub struct Request {
    owner: Owner,
    index: usize,
}

// SAFETY: the owner is only read through while the comm that holds both lives (`test`), and a proxy
// may be used from every thread.
unsafe impl Send for Request {}
// SAFETY: as above.
unsafe impl Sync for Request {}

/// Either end, where NCCL does not say which.
pub enum Comm<'a> {
    /// A sending end.
    Send(&'a SendComm),
    /// A receiving end.
    Recv(&'a RecvComm),
}

impl Comm<'_> {
    fn end(&self) -> &dyn End {
        match self {
            Comm::Send(c) => c.0.proxy.end(),
            Comm::Recv(c) => c.0.proxy.end(),
        }
    }

    fn address(&self) -> usize {
        match self {
            Comm::Send(c) => c.0.address(),
            Comm::Recv(c) => c.0.address(),
        }
    }
}

impl<E: ?Sized> Endpoint<E> {
    fn new(proxy: Proxy<E>, service: Link, owner: impl Fn(*const Proxy<E>) -> Owner) -> Self {
        let proxy = Arc::new(proxy);
        let owner = owner(Arc::as_ptr(&proxy));
        let requests = (0..REQUESTS)
            .map(|index| Tagged::new(Request { owner, index }))
            .collect();
        Endpoint {
            requests,
            proxy,
            _service: service,
        }
    }

    fn close(&mut self) -> Result<()>
    where
        E: End,
    {
        Arc::get_mut(&mut self.proxy)
            .ok_or_else(|| Error::internal("a comm is in use as it is closed"))?
            .end_mut()
            .close()
    }

    /// Tells this end from every other that lives.
    fn address(&self) -> usize {
        Arc::as_ptr(&self.proxy).cast::<u8>() as usize
    }

    /// Whether `region` was registered with this end.
    #[inline]
    fn check(&self, region: &MemoryRegion) -> Result<()> {
        if region.end != self.address() {
            return Err(foreign_region());
        }
        Ok(())
    }
}

#[cold]
fn foreign_region() -> Error {
    Error::invalid_argument("the memory was registered with another comm")
}

/// Starts to listen, and writes the handle that connectors need.
pub fn listen(dev: c_int, handle: &mut [u8; HANDLE_LEN]) -> Result<ListenComm> {
    let device = devices::get(dev)?;
    prune_old();
    let local = copy_engine::Listening::new()?;
    let address = local.address();
    let allowed = &config::current().transports;
    let data = allowed.allow(Transport::Tcp);
    let ports = match allowed.allow(Transport::Verbs) {
        true => device.ports.clone(),
        false => Vec::new(),
    };
    // RDMA is set up over it.
    let tcp = match data || !ports.is_empty() {
        false => None,
        true => match tcp::Listening::new(address.secret, data, !ports.is_empty()) {
            Ok(l) => Some(l),
            Err(e) if allowed.allow(Transport::CopyEngine) => {
                log::info!("no connections to other hosts: {e}");
                None
            }
            Err(e) => return Err(e),
        },
    };
    Handle {
        address,
        place: Place::here(),
        tcp: tcp.as_ref().map(|l| l.address()),
        data,
        rdma: rdma(&ports),
    }
    .encode(handle);
    Ok(ListenComm {
        local,
        tcp,
        ports,
        negotiations: Mutex::default(),
    })
}

/// What a handle says of RDMA ports.
fn rdma(ports: &[Port]) -> Option<Rdma> {
    let first = ports.first()?;
    Some(Rdma {
        ports: ports.len() as u8,
        infiniband: first.link_layer == LinkLayer::InfiniBand,
    })
}

/// A connection on its way.
#[derive(Debug)]
enum Connecting {
    Local(copy_engine::Connecting),
    Verbs(verbs::Connecting, String),
    Tcp(tcp::Connecting, String),
}

impl Connecting {
    /// Takes the best way that the handle's words leave open.
    fn new(to: &Handle, ports: &[Port], class: Option<u8>) -> Result<Connecting> {
        let allowed = &config::current().transports;
        let why = match (allowed.allow(Transport::CopyEngine), elsewhere(&to.place)) {
            (false, _) => "VCCL_TRANSPORT excludes the copy engines",
            (true, Some(why)) => why,
            (true, None) => return Connecting::local(to),
        };
        let tcp = allowed.allow(Transport::Tcp) && to.data;
        let no_rdma = match (to.tcp, to.rdma, rdma(ports)) {
            _ if !allowed.allow(Transport::Verbs) => "VCCL_TRANSPORT excludes verbs".into(),
            (_, _, None) => devices::no_rdma(),
            (_, None, _) => "there is no RDMA device there".into(),
            (_, Some(a), Some(b)) if a.infiniband != b.infiniband => {
                "one end has InfiniBand and the other RoCE".into()
            }
            (None, ..) => "there is no TCP address to set up RDMA with".into(),
            (Some(address), Some(there), Some(_)) => {
                let c =
                    verbs::Connecting::new(address, ports.to_vec(), there.ports.into(), tcp, class);
                return match c {
                    Ok(c) => Ok(Connecting::Verbs(c, why.into())),
                    Err(e) => Err(e.context("setting up RDMA")),
                };
            }
        };
        let here = allowed.allow(Transport::CopyEngine);
        match tcp && to.tcp.is_some() {
            // It fails, and says why.
            false if here && elsewhere(&to.place).is_some() => Connecting::local(to),
            _ => Connecting::tcp(to, format!("{why}, and {no_rdma}")),
        }
    }

    fn local(to: &Handle) -> Result<Connecting> {
        match copy_engine::Connecting::new(to.address) {
            Ok(c) => Ok(Connecting::Local(c)),
            Err(e) => Err(e.context("connecting")),
        }
    }

    fn tcp(to: &Handle, why: String) -> Result<Connecting> {
        if !config::current().transports.allow(Transport::Tcp) {
            return Err(Error::remote(format!(
                "{why}, and VCCL_TRANSPORT excludes TCP"
            )));
        }
        let Some(address) = to.tcp.filter(|_| to.data) else {
            return Err(Error::remote(format!(
                "{why}, and the listener does not listen on TCP: is VCCL_TRANSPORT the same on all ranks?"
            )));
        };
        match tcp::Connecting::new(address, purpose::TCP) {
            Ok(c) => Ok(Connecting::Tcp(c, why)),
            Err(e) => Err(e.context(over_tcp(&to.place, &why))),
        }
    }

    fn age(&self) -> Duration {
        match self {
            Connecting::Local(c) => c.age(),
            Connecting::Verbs(c, _) => c.age(),
            Connecting::Tcp(c, _) => c.age(),
        }
    }

    fn poll(&mut self, to: &Handle) -> Result<Option<SendComm>> {
        let failed = match self {
            Connecting::Local(c) => {
                return Ok(c.poll()?.map(|(service, connection)| {
                    log::info!(
                        "{}: by copy engine, for its process shares this host: its Unix socket answered, \
                         credentials and secret agree",
                        connection.describe()
                    );
                    SendComm::new(Box::new(connection), Some(service))
                }))
            }
            Connecting::Tcp(c, why) => {
                return Ok(c.poll()?.map(|mut connection| {
                    log::info!(
                        "{}: over TCP, {} sockets, for {why}",
                        connection.describe(),
                        connection.sockets()
                    );
                    SendComm::new(Box::new(connection), None)
                }))
            }
            Connecting::Verbs(c, why) => match c.poll() {
                Ok(done) => {
                    return Ok(done.map(|connection| {
                        log::info!(
                            "{}: by RDMA, {} queue pairs, for {why}, and a write was acknowledged",
                            connection.describe(),
                            connection.lanes()
                        );
                        SendComm::new(Box::new(connection), None)
                    }))
                }
                Err(e) => (e, why.clone()),
            },
        };
        let (e, why) = failed;
        if !to.data || !config::current().transports.allow(Transport::Tcp) {
            return Err(e);
        }
        log::warn!("RDMA cannot be used, TCP is taken instead: {e}");
        *self = Connecting::tcp(to, format!("{why}, and RDMA failed"))?;
        self.poll(to)
    }
}

struct Attempts {
    live: HashMap<u32, Connecting>,
    next: u32,
}

static ATTEMPTS: Mutex<Option<Attempts>> = Mutex::new(None);

/// Forgets attempts to connect that NCCL has given up: older than twice the time that they may take.
fn prune(age: Duration) {
    let dead: Vec<Connecting> = match lock(&ATTEMPTS).as_mut() {
        None => return,
        Some(a) => {
            let keys: Vec<u32> = a
                .live
                .iter()
                .filter(|(_, c)| c.age() >= age)
                .map(|(k, _)| *k)
                .collect();
            keys.iter().filter_map(|k| a.live.remove(k)).collect()
        }
    };
    drop(dead);
}

fn prune_old() {
    prune(Duration::from_secs(
        2 * config::current().connect_timeout_s + 60,
    ));
}

/// Connects to the listener of `handle`, in as many calls as it takes; `None`: call again with the
/// same handle, in which the attempt is noted. `traffic_class`: what the communicator asks for.
pub fn connect(
    dev: c_int,
    handle: &mut [u8; HANDLE_LEN],
    traffic_class: Option<u8>,
) -> Result<Option<SendComm>> {
    let device = devices::get(dev)?;
    let _relaxed = Relaxed::begin();
    let to = Handle::decode(handle)?;
    prune_old();
    let tried = attempt(handle)?;
    let known = tried.and_then(|n| lock(&ATTEMPTS).as_mut()?.live.remove(&n));
    let mut connecting = match known {
        Some(c) => c,
        None => Connecting::new(&to, &device.ports, traffic_class)?,
    };
    match connecting.poll(&to) {
        Ok(None) => {
            let mut attempts = lock(&ATTEMPTS);
            let a = attempts.get_or_insert_with(|| Attempts {
                live: HashMap::new(),
                next: 0,
            });
            let key = match tried {
                Some(n) if !a.live.contains_key(&n) => n,
                _ => {
                    // Wraps past attempts that are long over; 0 stands for none.
                    a.next = a.next.checked_add(1).unwrap_or(1);
                    a.next
                }
            };
            a.live.insert(key, connecting);
            set_attempt(handle, Some(key));
            Ok(None)
        }
        Ok(Some(comm)) => {
            set_attempt(handle, None);
            Ok(Some(comm))
        }
        Err(e) => {
            set_attempt(handle, None);
            Err(match (&connecting, e.code()) {
                (Connecting::Local(_), ResultCode::REMOTE) => {
                    e.context(unreachable_text(&to.place))
                }
                (Connecting::Local(_), _) => e.context("connecting"),
                (Connecting::Verbs(_, why), _) => e.context(format!("setting up RDMA, for {why}")),
                (Connecting::Tcp(_, why), _) => e.context(over_tcp(&to.place, why)),
            })
        }
    }
}

/// Why the copy engines cannot reach a process there, if that is known before trying.
fn elsewhere(there: &Place) -> Option<&'static str> {
    let here = Place::here();
    let known = |a: &[u8]| a.iter().any(|b| *b != 0);
    if here.boot != there.boot && known(&here.boot) && known(&there.boot) {
        Some("its process is on another host")
    } else if here.network != there.network && here.network != 0 && there.network != 0 {
        Some("its process is in another network namespace")
    } else {
        None
    }
}

/// What was tried over TCP, and what may be better.
#[cold]
fn over_tcp(there: &Place, why: &str) -> String {
    let cure = match elsewhere(there) {
        Some(why) if why.ends_with("namespace") => {
            " (ranks of one host that start in one network namespace, as with --network=host, need no TCP)"
        }
        _ => "",
    };
    format!("connecting over TCP, for {why}{cure}")
}

/// Why a listener may be out of reach, from where it is and where we are.
#[cold]
fn unreachable_text(there: &Place) -> &'static str {
    match elsewhere(there) {
        Some(why) if why.ends_with("host") => {
            "connecting to a listener on another host, for which TCP is needed (VCCL_TRANSPORT)"
        }
        Some(_) => {
            "connecting to a listener of this host in another network namespace; start the ranks in one \
             network namespace (for containers: --network=host), or allow TCP (VCCL_TRANSPORT)"
        }
        None => "connecting to a listener of this host and network namespace",
    }
}

/// The next connection to the listener; `None`: nobody waits.
pub fn accept(l: &ListenComm) -> Result<Option<RecvComm>> {
    if let Some((service, connection)) = l.local.accept() {
        return Ok(Some(RecvComm::new(Box::new(connection), Some(service))));
    }
    let Some(tcp) = &l.tcp else {
        return Ok(None);
    };
    let mut negotiations = lock(&l.negotiations);
    while let Some(accepted) = tcp.accept()? {
        match accepted {
            tcp::Accepted::Connection(connection) => {
                return Ok(Some(RecvComm::new(connection, None)));
            }
            tcp::Accepted::Verbs(socket, peer) => negotiations.push(verbs::Negotiation::new(
                l.ports.clone(),
                socket,
                tcp.service().clone(),
                peer,
            )),
        }
    }
    let mut i = 0;
    while i < negotiations.len() {
        match negotiations[i].poll() {
            Ok(false) => i += 1,
            Ok(true) => {
                let connection = negotiations.remove(i).finish()?;
                return Ok(Some(RecvComm::new(Box::new(connection), None)));
            }
            Err(e) => {
                // The connector takes another way, or says so to its user.
                let n = negotiations.remove(i);
                log::info!("RDMA with {} comes to nothing: {e}", n.peer());
            }
        }
    }
    Ok(None)
}

/// Registers memory with one end of a connection. `kind`: `NCCL_PTR_HOST` or `NCCL_PTR_CUDA`.
pub fn reg_mr(comm: Comm<'_>, addr: usize, size: usize, kind: c_int) -> Result<MemoryRegion> {
    let _relaxed = Relaxed::begin();
    let cuda = match kind {
        PTR_HOST => false,
        PTR_CUDA => true,
        other => {
            return Err(Error::invalid_argument(format!(
                "memory of kind {other} is not supported: host memory (1) and GPU memory (2) are"
            )))
        }
    };
    let region = comm.end().register(addr as u64, size as u64, cuda)?;
    Ok(MemoryRegion {
        region,
        end: comm.address(),
    })
}

/// Ends a registration. On return no copy of vccl's touches the memory, or a warning has said so.
pub fn dereg_mr(comm: Comm<'_>, mr: MemoryRegion) -> Result<()> {
    if mr.end != comm.address() {
        return Err(foreign_region());
    }
    let _relaxed = Relaxed::begin();
    comm.end().deregister(mr.region)
}

#[inline]
fn tag_bits(tag: c_int) -> u32 {
    tag as u32
}

/// Starts a send; `None`: not yet.
#[inline]
pub fn isend<'a>(
    c: &'a SendComm,
    addr: usize,
    size: usize,
    tag: c_int,
    mr: &MemoryRegion,
) -> Result<Option<&'a Tagged<Request>>> {
    c.0.check(mr)?;
    let started =
        c.0.proxy
            .isend(addr as u64, size as u64, tag_bits(tag), &mr.region)?;
    Ok(started.map(|index| &c.0.requests[index]))
}

/// Starts a receive; `None`: not yet.
#[inline]
pub fn irecv<'a>(
    c: &'a RecvComm,
    addr: usize,
    size: usize,
    tag: c_int,
    mr: &MemoryRegion,
) -> Result<Option<&'a Tagged<Request>>> {
    c.0.check(mr)?;
    let started =
        c.0.proxy
            .irecv(addr as u64, size as u64, tag_bits(tag), &mr.region)?;
    Ok(started.map(|index| &c.0.requests[index]))
}

/// Nothing to flush: a receive is over when its bytes are where the GPU sees them.
#[inline]
pub fn iflush(_c: &RecvComm) -> Result<()> {
    Ok(())
}

/// Moves a request's connection forward; `Some(bytes)`: the request is over, and its place is free.
#[inline]
pub fn test(r: &Request) -> Result<Option<usize>> {
    match r.owner {
        // SAFETY: the request lives in the pool of the comm that owns the proxy, at an address of its own;
        // the caller's borrow of the request says that the comm has not been closed.
        Owner::Send(p) => unsafe { &*p }.test(r.index),
        // SAFETY: as above.
        Owner::Recv(p) => unsafe { &*p }.test(r.index),
    }
}

/// Closes a sending end: waits, in bounded time, for the copies that it owns.
pub fn close_send(mut c: SendComm) -> Result<()> {
    let _relaxed = Relaxed::begin();
    let closed = c.0.close();
    drop(c);
    closed
}

/// Closes a receiving end: waits, in bounded time, until the sender writes to it no more.
pub fn close_recv(mut c: RecvComm) -> Result<()> {
    let _relaxed = Relaxed::begin();
    let closed = c.0.close();
    drop(c);
    closed
}

/// Closes a listener. Its accepted connections live on.
pub fn close_listen(c: ListenComm) -> Result<()> {
    prune_old();
    drop(c);
    Ok(())
}
