//! Variables in compose files and Kubernetes manifests.
//!
//! The whole tree is looked through: a mapping with a key `NCCL_...`, a text `NCCL_...=...` in a list, and a mapping
//! with `name` and `value`. Variables reach their process together where they stand in one list or mapping.

use std::collections::BTreeMap;

use saphyr_parser::{Event, Parser, ScalarStyle};

use super::{Source, clip, concerns_nccl, is_name};

/// Nesting that is followed; no manifest is deeper.
const DEPTH_MAX: usize = 64;

/// Who reads the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reader {
    Compose,
    Kubernetes,
}

#[derive(Debug, Clone)]
enum Node {
    Scalar {
        line: usize,
        text: String,
        is_plain: bool,
    },
    List {
        line: usize,
        items: Vec<Node>,
    },
    Mapping {
        line: usize,
        entries: Vec<(Node, Node)>,
    },
    /// An alias: what it stands for is looked at where it stands.
    Alias {
        line: usize,
    },
}

impl Node {
    const fn line(&self) -> usize {
        match self {
            Self::Scalar { line, .. } | Self::List { line, .. } | Self::Mapping { line, .. } | Self::Alias { line } => {
                *line
            }
        }
    }

    fn text(&self) -> Option<&str> {
        match self {
            Self::Scalar { text, .. } => Some(text),
            _ => None,
        }
    }

    fn entry(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Mapping { entries, .. } => {
                entries.iter().find(|(name, _)| name.text() == Some(key)).map(|(_, value)| value)
            }
            _ => None,
        }
    }
}

/// Reads a text of one or several documents.
pub(super) fn read(text: &str, reader: Reader) -> Result<Source, String> {
    let mut source = Source::default();
    let mut scope = 0;
    for document in documents(text)? {
        walk(&mut source, &document, reader, &mut scope);
    }
    Ok(source)
}

fn documents(text: &str) -> Result<Vec<Node>, String> {
    /// A list or mapping that is being read: its line, what it holds so far, and a key that waits for its value.
    struct Open {
        line: usize,
        is_mapping: bool,
        items: Vec<Node>,
    }
    let mut documents = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| {
            let place = error.marker();
            format!("line {}, column {}: {}", place.line(), place.col() + 1, clip(error.info()))
        })?;
        let line = span.start.line();
        let node = match event {
            Event::Scalar(value, style, _, _) => {
                Node::Scalar { line, text: value.into_owned(), is_plain: style == ScalarStyle::Plain }
            }
            Event::Alias(_) => Node::Alias { line },
            Event::SequenceStart(..) | Event::MappingStart(..) => {
                if open.len() == DEPTH_MAX {
                    return Err(format!("line {line}: nested more than {DEPTH_MAX} deep"));
                }
                open.push(Open { line, is_mapping: matches!(event, Event::MappingStart(..)), items: Vec::new() });
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(Open { line, is_mapping, items }) = open.pop() else { continue };
                if is_mapping {
                    let mut entries = Vec::new();
                    let mut items = items.into_iter();
                    while let (Some(key), Some(value)) = (items.next(), items.next()) {
                        entries.push((key, value));
                    }
                    Node::Mapping { line, entries }
                } else {
                    Node::List { line, items }
                }
            }
            _ => continue,
        };
        match open.last_mut() {
            Some(parent) => parent.items.push(node),
            None => documents.push(node),
        }
    }
    Ok(documents)
}

fn walk(source: &mut Source, node: &Node, reader: Reader, scope: &mut usize) {
    *scope += 1;
    let here = *scope;
    match node {
        Node::Scalar { .. } | Node::Alias { .. } => {}
        Node::List { items, .. } => {
            let mut seen = BTreeMap::new();
            for item in items {
                match item {
                    Node::Scalar { line, text, .. } if reader == Reader::Compose => {
                        list_item(source, *line, text, here);
                    }
                    Node::Mapping { .. } if item.entry("name").and_then(Node::text).is_some_and(concerns_nccl) => {
                        named_value(source, item, here, &mut seen);
                    }
                    Node::Mapping { line, entries } if reader == Reader::Compose && looks_like_environment(entries) => {
                        let name = entries[0].0.text().unwrap_or_default();
                        let message = format!("{name} is a mapping in a list; compose wants NAME=VALUE there");
                        let value = entries[0].1.text().unwrap_or_default();
                        source.error(*line, Some(name), message, Some(format!("- {name}={}", clip(value))));
                    }
                    _ => walk(source, item, reader, scope),
                }
            }
        }
        Node::Mapping { entries, .. } => {
            for (key, value) in entries {
                match key.text() {
                    Some(name) if name.starts_with("NCCL_") && is_name(name) => {
                        mapping_entry(source, name, value, reader, here);
                    }
                    _ => walk(source, value, reader, scope),
                }
            }
        }
    }
}

fn looks_like_environment(entries: &[(Node, Node)]) -> bool {
    entries.len() == 1 && entries[0].0.text().is_some_and(|name| name.starts_with("NCCL_") && is_name(name))
}

/// `NAME=VALUE` in a list of compose.
fn list_item(source: &mut Source, line: usize, text: &str, scope: usize) {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (text, None),
    };
    if !name.trim().starts_with("NCCL_") {
        return;
    }
    if !is_name(name) {
        source.error(
            line,
            None,
            format!("{:?} is no name of a variable", clip(name)),
            Some(format!("- {}={}", name.trim(), clip(value.unwrap_or_default().trim()))),
        );
        return;
    }
    if let Some(inner) =
        value.and_then(|value| ['"', '\''].into_iter().find_map(|quote| value.strip_prefix(quote)?.strip_suffix(quote)))
    {
        source.error(
            line,
            Some(name),
            "the quotes become part of the value: in a list, quotes go around the whole of NAME=VALUE",
            Some(format!("- \"{name}={}\"", clip(inner))),
        );
        return;
    }
    source.set(line, name, value.and_then(interpolated), scope);
}

/// What compose makes of `$`; nothing where a variable decides.
fn interpolated(value: &str) -> Option<String> {
    let plain = value.replace("$$", "\u{0}");
    (!plain.contains('$')).then(|| plain.replace('\u{0}', "$"))
}

/// `NAME: VALUE` in a mapping: compose's `environment`, a `ConfigMap`'s `data`.
fn mapping_entry(source: &mut Source, name: &str, value: &Node, reader: Reader, scope: usize) {
    let Node::Scalar { line, text, is_plain } = value else {
        if !matches!(value, Node::Alias { .. }) {
            source.error(value.line(), Some(name), "a variable's value is one text", None);
        }
        return;
    };
    let is_null = *is_plain && matches!(text.as_str(), "" | "~" | "null");
    match reader {
        Reader::Compose if is_null => source.set(*line, name, None, scope),
        Reader::Compose if *is_plain && is_boolean(text) => source.error(
            *line,
            Some(name),
            format!("{text} is a boolean to YAML, which compose refuses"),
            Some(format!(
                "{name}: \"{}\"",
                u8::from(["true", "yes", "on"].iter().any(|word| text.eq_ignore_ascii_case(word)))
            )),
        ),
        Reader::Compose if *is_plain && is_octal(text) => source.error(
            *line,
            Some(name),
            format!("YAML readers take {text} for octal"),
            Some(match text.trim_start_matches('0') {
                "" => format!("{name}: \"0\""),
                digits => format!("{name}: \"{digits}\""),
            }),
        ),
        Reader::Compose => source.set(*line, name, interpolated(text), scope),
        Reader::Kubernetes if *is_plain && !is_string(text) => source.error(
            *line,
            Some(name),
            format!("{} is no string to YAML, and Kubernetes wants one", shown(text)),
            Some(format!("{name}: \"{text}\"")),
        ),
        Reader::Kubernetes => source.set(*line, name, Some(text.clone()), scope),
    }
}

/// `{name: NAME, value: VALUE}` in a list of Kubernetes.
fn named_value<'a>(source: &mut Source, item: &'a Node, scope: usize, seen: &mut BTreeMap<&'a str, usize>) {
    let Some(Node::Scalar { line, text: name, .. }) = item.entry("name") else { return };
    if !name.trim().starts_with("NCCL_") {
        return;
    }
    if !is_name(name) {
        source.error(*line, None, format!("{:?} is no name of a variable", clip(name)), None);
        return;
    }
    if let Some(first) = seen.insert(name, *line) {
        source.warning(*line, Some(name), format!("line {first} sets it too; the last one counts"), None);
    }
    match item.entry("value") {
        Some(Node::Scalar { line, text, is_plain }) => {
            if *is_plain && !is_string(text) {
                source.error(
                    *line,
                    Some(name),
                    format!("{} is no string to YAML, and Kubernetes wants one", shown(text)),
                    Some(format!("value: \"{text}\"")),
                );
                return;
            }
            // $(NAME) stands for another variable of the container.
            let known = !text.contains("$(");
            source.set(*line, name, known.then(|| text.clone()), scope);
        }
        _ => source.set(*line, name, None, scope),
    }
}

fn shown(text: &str) -> String {
    if text.is_empty() { "nothing".to_owned() } else { clip(text) }
}

fn is_boolean(text: &str) -> bool {
    ["true", "false", "yes", "no", "on", "off"].iter().any(|word| text.eq_ignore_ascii_case(word))
}

fn is_octal(text: &str) -> bool {
    text.len() > 1 && text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether YAML takes a plain scalar for a text.
fn is_string(text: &str) -> bool {
    !matches!(text, "" | "~" | "null" | "Null" | "NULL")
        && !is_boolean(text)
        && text.parse::<f64>().is_err()
        && !text.starts_with("0x")
        && !text.starts_with("0o")
}
