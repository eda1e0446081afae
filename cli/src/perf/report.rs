//! The results: gathered from the ranks, as a table and as JSON.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use comfy_table::{presets, CellAlignment, Table};
use plugin_tests::error::Result;
use plugin_tests::memory::Kind;
use plugin_tests::nodes::Node;
use plugin_tests::params::Params;
use serde::Serialize;

use super::sizes::ELEMENT;
use super::{plan, Args, Op, Place};

/// One size's result.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Bytes, as nccl-tests counts them for the operation.
    pub size: usize,
    /// Elements that one rank sends to one other.
    count: usize,
    /// The type of an element.
    #[serde(rename = "type")]
    element: &'static str,
    /// Mean over the ranks.
    time_us: f64,
    /// The same for the median of the iterations: one way of a ping-pong.
    #[serde(skip_serializing_if = "Option::is_none")]
    median_us: Option<f64>,
    algbw_gbps: f64,
    busbw_gbps: f64,
    /// Wrong elements; none if nothing was checked.
    wrong: Option<usize>,
    /// One stream of memcpy at the same size, measured before and after.
    #[serde(skip_serializing_if = "Option::is_none")]
    memcpy_gbps: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    algbw_to_memcpy: Option<f64>,
}

#[derive(Serialize)]
struct Host {
    cpu: String,
    cores: usize,
    gpus: Vec<String>,
}

/// All results of a run.
#[derive(Serialize)]
pub struct Report {
    tool: &'static str,
    version: &'static str,
    date: String,
    host: Host,
    plugin: String,
    network: String,
    abi: u32,
    operation: &'static str,
    ranks: usize,
    memory: &'static str,
    iters: usize,
    warmup_iters: usize,
    steps: usize,
    channels: usize,
    way: &'static str,
    buffers: usize,
    results: Vec<Row>,
    avg_busbw_gbps: f64,
    wrong: usize,
    /// All ranks are on this machine.
    #[serde(skip)]
    here: bool,
    #[serde(skip)]
    op: Op,
    #[serde(skip)]
    expected: usize,
    #[serde(skip)]
    pending: BTreeMap<usize, Vec<Params>>,
}

impl Report {
    /// No results yet.
    pub fn new(args: &Args, place: &Place, plugin: &Path, expected: usize) -> Report {
        Report {
            tool: "vccl perf",
            version: env!("CARGO_PKG_VERSION"),
            date: now(),
            host: Host {
                cpu: cpu_model(),
                cores: std::thread::available_parallelism().map_or(0, |n| n.get()),
                gpus: place.gpus.clone(),
            },
            plugin: plugin.display().to_string(),
            network: String::new(),
            abi: 0,
            operation: args.op.name(),
            ranks: place.ranks,
            memory: match place.kind {
                Kind::Pinned => "pinned",
                k if k.is_device() => "device",
                _ => "host",
            },
            iters: args.iters,
            warmup_iters: args.warmup_iters,
            steps: args.steps,
            channels: args.channels,
            way: args.way().name(),
            buffers: args.buffers,
            results: Vec::new(),
            avg_busbw_gbps: 0.0,
            wrong: 0,
            here: !args.nodes.iter().any(|n| matches!(n, Node::Agent(_))),
            op: args.op,
            expected,
            pending: BTreeMap::new(),
        }
    }

    /// Takes what a rank reports; returns the row that this completes.
    pub fn add(&mut self, _rank: usize, p: &Params) -> Result<Option<Row>> {
        let index: usize = p.get("index")?;
        if p.text("abi").is_some() {
            self.abi = p.get("abi")?;
            self.network = p.get("network")?;
        }
        let of_size = self.pending.entry(index).or_default();
        of_size.push(p.clone());
        if of_size.len() < self.ranks {
            return Ok(None);
        }
        let all = self.pending.remove(&index).unwrap_or_default();
        let row = self.row(&all)?;
        self.wrong += row.wrong.unwrap_or(0);
        self.results.push(row.clone());
        let sum: f64 = self.results.iter().map(|r| r.busbw_gbps).sum();
        self.avg_busbw_gbps = sum / self.results.len() as f64;
        Ok(Some(row))
    }

    fn row(&self, all: &[Params]) -> Result<Row> {
        let size: usize = all[0].get("size")?;
        let mut seconds = 0.0;
        let mut median = None;
        let mut wrong = None;
        let mut memcpy = None;
        for p in all {
            let more: f64 = p.get("seconds")?;
            match self.way {
                // A stream is there when its receiver has it.
                "oneway" => seconds = more.max(seconds),
                _ => seconds += more / all.len() as f64,
            }
            if p.text("median").is_some() {
                let more = p.get::<f64>("median")? / all.len() as f64;
                *median.get_or_insert(0.0) += more;
            }
            if p.text("wrong").is_some() {
                wrong = Some(wrong.unwrap_or(0) + p.get::<usize>("wrong")?);
            }
            if p.text("memcpy").is_some() {
                memcpy = Some(p.get::<f64>("memcpy")?);
            }
        }
        let chunk = plan::chunk(self.op, size, self.ranks);
        // What nccl-tests calls the size is what the ranks' parts add up to.
        let moved = match self.op {
            Op::Sendrecv => size,
            Op::Alltoall | Op::Allgather => chunk * self.ranks,
        };
        let algbw = if seconds > 0.0 {
            moved as f64 / seconds / 1e9
        } else {
            0.0
        };
        Ok(Row {
            size: moved,
            count: chunk / ELEMENT as usize,
            element: "float",
            time_us: seconds * 1e6,
            median_us: median.map(|m: f64| m * 1e6),
            algbw_gbps: algbw,
            busbw_gbps: algbw * self.op.bus_factor(self.ranks),
            wrong,
            memcpy_gbps: memcpy,
            algbw_to_memcpy: memcpy.filter(|m| *m > 0.0).map(|m| algbw / m),
        })
    }

    /// An error unless every size was reported by every rank.
    pub fn check_complete(&self) -> std::result::Result<(), String> {
        match self.results.len() {
            n if n == self.expected => Ok(()),
            n => Err(format!("{n} of {} sizes were measured", self.expected)),
        }
    }

    /// Wrong elements at all sizes.
    pub fn wrong(&self) -> usize {
        self.wrong
    }

    /// The table, and the lines around it.
    pub fn text(&self) -> String {
        let host_memory = self.results.iter().any(|r| r.memcpy_gbps.is_some());
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        let mut header = vec![
            "size\n(B)",
            "count\n(elements)",
            "type\n",
            "time\n(us)",
            "algbw\n(GB/s)",
            "busbw\n(GB/s)",
            "#wrong\n",
        ];
        if host_memory {
            header.extend(["memcpy\n(GB/s)", "algbw/\nmemcpy"]);
        }
        table.set_header(header);
        for r in &self.results {
            let mut cells = vec![
                r.size.to_string(),
                r.count.to_string(),
                r.element.to_string(),
                format!("{:.2}", r.time_us),
                format!("{:.2}", r.algbw_gbps),
                format!("{:.2}", r.busbw_gbps),
                r.wrong.map_or("N/A".to_string(), |w| w.to_string()),
            ];
            if let (Some(m), Some(q)) = (r.memcpy_gbps, r.algbw_to_memcpy) {
                cells.extend([format!("{m:.2}"), format!("{q:.2}")]);
            }
            table.add_row(cells);
        }
        for c in table.column_iter_mut() {
            c.set_cell_alignment(CellAlignment::Right);
        }
        let mut out = String::new();
        out += &format!(
            "# vccl perf {} {}: {} ranks{}, {} memory, plugin {} ({}, v{})\n",
            self.operation,
            self.version,
            self.ranks,
            match self.host.gpus.len() {
                n if n > 0 && n < self.ranks && self.here =>
                    format!(" that share {n} GPU{}", plural(n)),
                _ => String::new(),
            },
            self.memory,
            self.plugin,
            self.network,
            self.abi
        );
        out += &format!(
            "# {} iterations after {}, {} in flight, {} channel{}, {} buffer{}; out of place{}\n#\n",
            self.iters,
            self.warmup_iters,
            self.steps,
            self.channels,
            plural(self.channels),
            self.buffers,
            plural(self.buffers),
            match self.way {
                "pingpong" => "; ping-pong: time is one way",
                "oneway" => "; one way: rank 0 to rank 1",
                _ => "",
            }
        );
        out += &format!("{table}\n");
        out += &format!(
            "# Out of bounds values : {} {}\n",
            self.wrong,
            if self.wrong == 0 { "OK" } else { "FAILED" }
        );
        out += &format!("# Avg bus bandwidth    : {:.4}\n", self.avg_busbw_gbps);
        out
    }

    /// The same as JSON.
    pub fn json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).unwrap_or_else(|e| format!("\"{e}\""));
        text.push('\n');
        text
    }
}

fn plural(n: usize) -> &'static str {
    if n == 1 {
        ""
    } else {
        "s"
    }
}

fn cpu_model() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines()
        .find(|l| l.starts_with("model name"))
        .and_then(|l| l.split_once(':'))
        .map_or("unknown".to_string(), |(_, m)| m.trim().to_string())
}

/// The time now, in UTC, as in RFC 3339.
fn now() -> String {
    let s = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    date(s)
}

fn date(seconds: u64) -> String {
    let (days, rest) = ((seconds / 86_400) as i64, seconds % 86_400);
    // Days since 0000-03-01, in eras of 400 years.
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let mp = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        rest / 3_600,
        rest / 60 % 60,
        rest % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(date(1_000_000_000), "2001-09-09T01:46:40Z");
        assert_eq!(date(4_107_542_399), "2100-02-28T23:59:59Z");
    }
}
