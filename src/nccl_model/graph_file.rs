//! NCCL's graph files: the XML of `NCCL_GRAPH_FILE` and `NCCL_GRAPH_DUMP_FILE`.
//!
//! NCCL reads such files with a reader of its own, which takes much for granted: a wrong order of
//! GPUs may end in a crash. So this reader refuses what NCCL would stumble over, and says why.

use std::fmt::Write as _;

use crate::machine::PathKind;

use super::Pattern;

/// Largest file that is read.
pub const MAX_BYTES: usize = 4 << 20;
/// Most graphs, channels of a graph and GPUs of a channel.
const MAX_GRAPHS: usize = 16;
const MAX_CHANNELS: usize = 64;
const MAX_GPUS: usize = 1024;
/// Most elements of a file: NCCL has room for 4096 before 2.29.
const MAX_NODES: u32 = 65_536;
/// Most attributes of an element; NCCL writes up to a dozen.
const MAX_ATTRIBUTES: usize = 64;
/// The version of the form.
const VERSION: &str = "1";
/// Kinds of path that a graph file may name, by release: C2C never, P2C since 2.27.
const KINDS: [PathKind; 9] = [
    PathKind::Loc,
    PathKind::Nvl,
    PathKind::Nvb,
    PathKind::Pix,
    PathKind::Pxb,
    PathKind::P2c,
    PathKind::Pxn,
    PathKind::Phb,
    PathKind::Sys,
];

/// Why a text is no graph file, or none that NCCL can use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GraphFileError {
    /// Longer than any graph file.
    #[error("{bytes} bytes are no graph file: there are at most {MAX_BYTES}")]
    Size {
        /// Bytes of the text.
        bytes: usize,
    },
    /// Not XML.
    #[error("not XML: {0}")]
    Xml(String),
    /// XML, and no graph file.
    #[error("line {line}: {reason}")]
    Content {
        /// Line number.
        line: u32,
        /// What is wrong.
        reason: String,
    },
}

/// The graphs of a file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GraphFile {
    /// In the order of the file. Of two with one id NCCL takes the last.
    pub graphs: Vec<FileGraph>,
}

/// One graph of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct FileGraph {
    /// What it is for: 0 ring, 1 tree, 2 and 4 CollNet, 3 NVLS.
    pub id: u32,
    /// Its shape.
    pub pattern: Pattern,
    /// Whether channels may use different adapters on the two sides; no effect on one machine.
    pub cross_nic: u32,
    /// GB/s of a channel between GPUs.
    pub speed_intra_gbps: f64,
    /// GB/s of a channel towards the network, or the NVSwitch.
    pub speed_inter_gbps: f64,
    /// Microseconds towards the network.
    pub latency_inter_us: f64,
    /// The longest kind of path between GPUs.
    pub type_intra: PathKind,
    /// The longest kind of path towards the network.
    pub type_inter: PathKind,
    /// Whether every channel has the same order.
    pub same_channels: bool,
    /// GPUs of each channel in order, by the driver's number of the device on this machine (which is
    /// the rank where a communicator has all GPUs in order). NVLS names only the head.
    pub orders: Vec<Vec<u32>>,
}

type Node<'a, 'b> = roxmltree::Node<'a, 'b>;

impl GraphFile {
    /// The graph that NCCL takes for an id.
    pub fn graph(&self, id: u32) -> Option<&FileGraph> {
        self.graphs.iter().rev().find(|graph| graph.id == id)
    }

    /// Reads a graph file.
    pub fn read(text: &str) -> Result<Self, GraphFileError> {
        if text.len() > MAX_BYTES {
            return Err(GraphFileError::Size { bytes: text.len() });
        }
        // The parser compares every attribute of an element with every other: without a bound a file would take minutes.
        if text.split('<').any(|element| element.matches('=').take(MAX_ATTRIBUTES + 1).count() > MAX_ATTRIBUTES) {
            return Err(GraphFileError::Xml(format!("an element has more than {MAX_ATTRIBUTES} attributes")));
        }
        let options = roxmltree::ParsingOptions { nodes_limit: MAX_NODES, ..roxmltree::ParsingOptions::default() };
        let document = roxmltree::Document::parse_with_options(text, options)
            .map_err(|error| GraphFileError::Xml(error.to_string().chars().take(200).collect()))?;
        let root = document.root_element();
        if root.tag_name().name() != "graphs" {
            return Err(at(root, format!("expected <graphs version=\"1\">, not <{}>", shown(root.tag_name().name()))));
        }
        match root.attribute("version") {
            Some(VERSION) => {}
            Some(other) => return Err(at(root, format!("version {:?}: NCCL reads version {VERSION}", shown(other)))),
            None => return Err(at(root, format!("no version: NCCL needs version=\"{VERSION}\""))),
        }
        let graphs: Vec<Node<'_, '_>> = elements(root, "graph")?;
        if graphs.len() > MAX_GRAPHS {
            return Err(at(root, format!("{} graphs: there are {MAX_GRAPHS} at most", graphs.len())));
        }
        let graphs = graphs.into_iter().map(read_graph).collect::<Result<_, _>>()?;
        Ok(Self { graphs })
    }

    /// Writes it as NCCL's `NCCL_GRAPH_DUMP_FILE` does.
    pub fn write(&self) -> String {
        let mut text = format!("<graphs version=\"{VERSION}\">\n");
        for graph in &self.graphs {
            let _ = writeln!(
                text,
                "  <graph id=\"{}\" pattern=\"{}\" crossnic=\"{}\" nchannels=\"{}\" speedintra=\"{}\" \
                 speedinter=\"{}\" latencyinter=\"{}\" typeintra=\"{}\" typeinter=\"{}\" samechannels=\"{}\"{}>",
                graph.id,
                graph.pattern.number(),
                graph.cross_nic,
                graph.orders.len(),
                graph.speed_intra_gbps,
                graph.speed_inter_gbps,
                graph.latency_inter_us,
                graph.type_intra,
                graph.type_inter,
                u32::from(graph.same_channels),
                if graph.orders.is_empty() { "/" } else { "" },
            );
            for order in &graph.orders {
                text.push_str("    <channel>\n");
                for device in order {
                    // As C's "%#lx" does: zero has no prefix.
                    let number = if *device == 0 { "0".to_owned() } else { format!("{device:#x}") };
                    let _ = writeln!(text, "      <gpu dev=\"{number}\"/>");
                }
                text.push_str("    </channel>\n");
            }
            if !graph.orders.is_empty() {
                text.push_str("  </graph>\n");
            }
        }
        text.push_str("</graphs>\n");
        text
    }
}

fn read_graph(node: Node<'_, '_>) -> Result<FileGraph, GraphFileError> {
    let number = |name: &str| -> Result<u32, GraphFileError> {
        let text = needed(node, name)?;
        whole(text).ok_or_else(|| at(node, format!("{name}={:?} is not a whole number", shown(text))))
    };
    let decimal = |name: &str, text: &str| -> Result<f64, GraphFileError> {
        let value = text.parse::<f64>().ok().filter(|value| value.is_finite() && (0.0..=10_000.0).contains(value));
        value.ok_or_else(|| at(node, format!("{name}={:?} is not a number from 0 to 10000", shown(text))))
    };
    let kind = |name: &str| -> Result<PathKind, GraphFileError> {
        let text = needed(node, name)?;
        // NCCL takes any other word for LOC without telling. "DIS" is what 2.29 dumps for no network.
        let kind = PathKind::of(text).filter(|kind| KINDS.contains(kind) || *kind == PathKind::Dis);
        kind.ok_or_else(|| {
            let words: Vec<&str> = KINDS.iter().map(|kind| kind.name()).collect();
            at(node, format!("{name}={:?} is none of {}", shown(text), words.join(", ")))
        })
    };
    let pattern = number("pattern")?;
    let channels = elements(node, "channel")?;
    let said = number("nchannels")? as usize;
    if said != channels.len() || said > MAX_CHANNELS {
        let found = channels.len();
        return Err(at(
            node,
            format!("nchannels={said} with {found} channels: NCCL goes by the first and needs as many"),
        ));
    }
    let speed_intra = needed(node, "speedintra")?;
    let speed_inter = needed(node, "speedinter")?;
    let graph = FileGraph {
        id: number("id")?,
        pattern: Pattern::of(pattern)
            .ok_or_else(|| at(node, format!("pattern={pattern}: 4 is a ring, 1 to 3 are trees, 5 is NVLS")))?,
        cross_nic: number("crossnic")?,
        speed_intra_gbps: decimal("speedintra", speed_intra)?,
        speed_inter_gbps: decimal("speedinter", speed_inter)?,
        latency_inter_us: node.attribute("latencyinter").map_or(Ok(0.0), |text| decimal("latencyinter", text))?,
        type_intra: kind("typeintra")?,
        type_inter: kind("typeinter")?,
        same_channels: number("samechannels")? != 0,
        orders: channels.into_iter().map(read_channel).collect::<Result<_, _>>()?,
    };
    if graph.speed_intra_gbps <= 0.0 && !graph.orders.is_empty() {
        return Err(at(node, "speedintra=\"0\": NCCL takes no channel without bandwidth".to_owned()));
    }
    Ok(graph)
}

fn read_channel(node: Node<'_, '_>) -> Result<Vec<u32>, GraphFileError> {
    let mut order = Vec::new();
    for child in node.children().filter(Node::is_element) {
        match child.tag_name().name() {
            // Adapters matter between machines alone.
            "net" => {}
            "gpu" => {
                let text = needed(child, "dev")?;
                // NCCL reads it as hexadecimal, prefix or not.
                let digits = text.strip_prefix("0x").unwrap_or(text);
                let device = u32::from_str_radix(digits, 16).ok().filter(|device| (*device as usize) < MAX_GPUS);
                order.push(device.ok_or_else(|| at(child, format!("dev={:?} is no GPU", shown(text))))?);
            }
            other => return Err(at(child, format!("expected <gpu> or <net>, not <{}>", shown(other)))),
        }
        if order.len() > MAX_GPUS {
            return Err(at(node, format!("a channel of more than {MAX_GPUS} GPUs")));
        }
    }
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if let Some([device, ..]) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(at(node, format!("GPU {device} stands twice in a channel")));
    }
    Ok(order)
}

/// Children that are elements, which must all have this name.
fn elements<'a, 'b>(node: Node<'a, 'b>, name: &str) -> Result<Vec<Node<'a, 'b>>, GraphFileError> {
    let children: Vec<Node<'a, 'b>> = node.children().filter(Node::is_element).collect();
    match children.iter().find(|child| child.tag_name().name() != name) {
        Some(other) => Err(at(*other, format!("expected <{name}>, not <{}>", shown(other.tag_name().name())))),
        None => Ok(children),
    }
}

fn needed<'a>(node: Node<'a, '_>, name: &str) -> Result<&'a str, GraphFileError> {
    node.attribute(name).ok_or_else(|| at(node, format!("<{}> has no {name}", shown(node.tag_name().name()))))
}

/// Decimal, or hexadecimal with its prefix: what NCCL's own files hold.
fn whole(text: &str) -> Option<u32> {
    text.strip_prefix("0x").map_or_else(|| text.parse().ok(), |digits| u32::from_str_radix(digits, 16).ok())
}

fn at(node: Node<'_, '_>, reason: String) -> GraphFileError {
    GraphFileError::Content { line: node.document().text_pos_at(node.range().start).row, reason }
}

/// What stood there, for a message: bounded.
fn shown(text: &str) -> String {
    text.chars().take(40).collect()
}
