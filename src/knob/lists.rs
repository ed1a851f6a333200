//! NCCL_ALGO and NCCL_PROTO: lists of algorithms or protocols, since 2.24 for each collective.

use crate::machine::NcclVersion;

use super::Values;

/// Collectives in NCCL's order, spelled as NCCL spells them.
pub(super) const FUNCTIONS: [&str; 5] = ["Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"];

const ALGORITHMS: [&str; 7] = ["Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"];
const PROTOCOLS: [&str; 3] = ["LL", "LL128", "Simple"];

/// First release that understands `function:list;function:list` and refuses unknown words.
pub(super) const PER_FUNCTION: NcclVersion = NcclVersion::v2(24, 3);

/// Which algorithms implement each collective, in the order of [`FUNCTIONS`].
const IMPLEMENTED: [&[&str]; 5] = [
    &["Ring"],
    &["Ring"],
    &["Ring", "CollNetDirect", "NVLS", "PAT"],
    &["Ring", "CollNetDirect", "NVLS", "PAT"],
    &["Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree"],
];

/// The words a release knows; none for a variable that is not a list.
pub(super) fn elements(values: Values, version: NcclVersion) -> &'static [&'static str] {
    match values {
        Values::Protocols => &PROTOCOLS,
        Values::Algorithms if version >= NcclVersion::v2(23, 0) => &ALGORITHMS,
        Values::Algorithms if version >= NcclVersion::v2(18, 0) => &ALGORITHMS[..6],
        Values::Algorithms if version >= NcclVersion::v2(17, 0) => &ALGORITHMS[..5],
        Values::Algorithms => &ALGORITHMS[..4],
        _ => &[],
    }
}

/// What a list selects for each collective.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lists {
    /// By collective in NCCL's order: the words that stay enabled, or nothing where the list leaves
    /// NCCL's own choice untouched.
    selected: [Option<Vec<&'static str>>; 5],
    /// Words and parts that NCCL passes over without a word.
    pub(super) dropped: Vec<String>,
}

impl Lists {
    /// Collectives with what stays enabled for them; `None` leaves NCCL's own choice untouched.
    pub fn selections(&self) -> impl Iterator<Item = (&'static str, Option<&[&'static str]>)> {
        FUNCTIONS.into_iter().zip(self.selected.iter().map(Option::as_deref))
    }

    /// What stays enabled for a collective, named in NCCL's spelling but any case ("allreduce").
    pub fn selected_for(&self, function: &str) -> Option<&[&'static str]> {
        self.selections().find(|(name, _)| name.eq_ignore_ascii_case(function)).and_then(|(_, selected)| selected)
    }

    /// Collectives that are left without any algorithm that implements them.
    pub(super) fn left_without_algorithm(&self) -> Vec<&'static str> {
        self.selections()
            .zip(IMPLEMENTED)
            .filter(|((_, selected), implemented)| {
                selected.is_some_and(|words| !words.iter().any(|word| implemented.contains(word)))
            })
            .map(|((function, _), _)| function)
            .collect()
    }

    /// Collectives for which nothing at all stays enabled.
    pub(super) fn left_empty(&self) -> Vec<&'static str> {
        self.selections()
            .filter(|(_, selected)| selected.is_some_and(<[_]>::is_empty))
            .map(|(function, _)| function)
            .collect()
    }

    fn untouched() -> Self {
        Self { selected: [const { None }; 5], dropped: Vec::new() }
    }

    /// Whether the list changes nothing.
    pub(super) fn is_untouched(&self) -> bool {
        self.selected.iter().all(Option::is_none)
    }
}

/// Why NCCL refuses a list when a communicator starts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ListError {
    /// A word it does not know.
    #[error("NCCL does not know {0:?} here")]
    Element(String),
    /// A collective it does not know.
    #[error("NCCL does not know a collective {0:?}")]
    Function(String),
    /// A list that would overwrite those before it.
    #[error("only the first entry may stand without a collective")]
    LatePlain,
    /// NCCL reads through a null pointer.
    #[error("an entry of colons alone crashes NCCL")]
    Crash,
}

/// Reads a list as a release does.
pub(super) fn parse(values: Values, text: &str, version: NcclVersion) -> Result<Lists, ListError> {
    let known = elements(values, version);
    if version >= PER_FUNCTION { parse_per_function(text, known) } else { Ok(parse_plain(text, known)) }
}

/// `strtok`: neighbouring separators count as one, and those at the ends do not count.
fn tokens(text: &str, separator: char) -> impl Iterator<Item = &str> {
    text.split(separator).filter(|token| !token.is_empty())
}

/// Splits off `^`, which turns the list around.
fn inversion(list: &str) -> (bool, &str) {
    list.strip_prefix('^').map_or((false, list), |rest| (true, rest))
}

fn select(known: &'static [&'static str], inverted: bool, named: &[usize]) -> Vec<&'static str> {
    known.iter().enumerate().filter(|(at, _)| named.contains(at) != inverted).map(|(_, word)| *word).collect()
}

fn position(words: &[&str], wanted: &str) -> Option<usize> {
    words.iter().position(|word| word.eq_ignore_ascii_case(wanted))
}

fn parse_per_function(text: &str, known: &'static [&'static str]) -> Result<Lists, ListError> {
    let mut lists = Lists::untouched();
    // NCCL tells the first entry by its address in the string, so a leading semicolon makes even the
    // first one a later one.
    let starts_late = text.starts_with(';');
    for (index, entry) in tokens(text, ';').enumerate() {
        let mut parts = tokens(entry, ':');
        let (function, list) = match (parts.next(), parts.next()) {
            (Some(function), Some(list)) => (Some(function), list),
            _ if index > 0 || starts_late => return Err(ListError::LatePlain),
            (Some(list), None) => (None, list),
            (None, _) => return Err(ListError::Crash),
        };
        lists.dropped.extend(parts.map(|part| format!(":{part}")));
        let at = match function {
            Some(name) => Some(position(&FUNCTIONS, name).ok_or_else(|| ListError::Function(name.to_owned()))?),
            None => None,
        };
        let (inverted, list) = inversion(list);
        let named = tokens(list, ',')
            .map(|word| position(known, word).ok_or_else(|| ListError::Element(word.to_owned())))
            .collect::<Result<Vec<_>, _>>()?;
        let selected = select(known, inverted, &named);
        match at {
            Some(at) => lists.selected[at] = Some(selected),
            None => lists.selected.fill(Some(selected)),
        }
    }
    Ok(lists)
}

/// The older form: one list for every collective, unknown words passed over.
fn parse_plain(text: &str, known: &'static [&'static str]) -> Lists {
    let mut lists = Lists::untouched();
    if text.is_empty() {
        // Read as a list that enables nothing; reported as unset by the caller, which is what the
        // variable is to a person.
        return lists;
    }
    let (inverted, list) = inversion(text);
    let mut named = Vec::new();
    for word in tokens(list, ',') {
        match position(known, word) {
            Some(at) => named.push(at),
            None => lists.dropped.push(word.to_owned()),
        }
    }
    lists.selected.fill(Some(select(known, inverted, &named)));
    lists
}

/// Whether a text enables a word for any collective, in either form of the list.
pub(super) fn enables(values: Values, text: &str, word: &str) -> bool {
    let newest = NcclVersion::v2(u32::MAX, 0);
    let oldest = NcclVersion::v2(23, 4);
    [newest, oldest]
        .into_iter()
        .filter_map(|version| parse(values, text, version).ok())
        .any(|lists| lists.selections().any(|(_, selected)| selected.is_some_and(|words| words.contains(&word))))
}

/// Drops blanks at the ends and around separators, where a person may put them and NCCL may not.
fn without_blanks_at(text: &str, separators: &[char]) -> String {
    let mut tight = String::with_capacity(text.len());
    for part in text.split_inclusive(separators) {
        let end = part.strip_suffix(separators).unwrap_or(part);
        tight.push_str(end.trim());
        tight.push_str(&part[end.len()..]);
    }
    tight
}

/// Writes a list the one way this tool writes it: NCCL's spelling of algorithms and protocols,
/// collectives in lower case, no blanks.
pub(super) fn canonical(values: Values, text: &str) -> Result<String, ListError> {
    let newest = NcclVersion::v2(u32::MAX, 0);
    let known = elements(values, newest);
    let tight = without_blanks_at(text, &[';', ':', ',', '^']);
    let tight = tight.trim_matches(';');
    let lists = parse(values, tight, newest)?;
    if let Some(part) = lists.dropped.first() {
        return Err(ListError::Element(part.clone()));
    }
    let entries = tokens(tight, ';').map(|entry| {
        let (function, list) = entry.rsplit_once(':').unwrap_or(("", entry));
        let function = function.trim_matches(':');
        let (inverted, list) = inversion(list);
        let words: Vec<_> = tokens(list, ',').filter_map(|word| position(known, word)).map(|at| known[at]).collect();
        let prefix = if function.is_empty() { String::new() } else { format!("{}:", function.to_ascii_lowercase()) };
        format!("{prefix}{}{}", if inverted { "^" } else { "" }, words.join(","))
    });
    Ok(entries.collect::<Vec<_>>().join(";"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: NcclVersion = NcclVersion::v2(28, 9);
    const OLD: NcclVersion = NcclVersion::v2(23, 4);

    fn algorithms(text: &str, version: NcclVersion) -> Result<Lists, ListError> {
        parse(Values::Algorithms, text, version)
    }

    #[test]
    fn new_form_selects_per_collective() {
        let lists = algorithms("Ring,Tree;allreduce:tree;BROADCAST:^tree", NEW).unwrap();
        assert_eq!(lists.selected_for("AllGather"), Some(&["Tree", "Ring"][..]));
        assert_eq!(lists.selected_for("allreduce"), Some(&["Tree"][..]));
        assert_eq!(lists.selected_for("Broadcast").unwrap().len(), 6);
        assert!(algorithms("allreduce:ring", NEW).unwrap().selected_for("Reduce").is_none());
    }

    #[test]
    fn new_form_refuses_what_it_does_not_know() {
        let cases = [
            ("rings", ListError::Element("rings".into())),
            ("ring, tree", ListError::Element(" tree".into())),
            ("allreduce:ring;tree", ListError::LatePlain),
            (";ring", ListError::LatePlain),
            ("allreduces:ring", ListError::Function("allreduces".into())),
            ("allreduce:", ListError::Element("allreduce".into())),
            (":", ListError::Crash),
            ("ring;:", ListError::LatePlain),
        ];
        for (text, error) in cases {
            assert_eq!(algorithms(text, NEW), Err(error), "{text:?}");
        }
        assert_eq!(algorithms("allreduce:ring:tree", NEW).unwrap().dropped, [":tree"]);
    }

    #[test]
    fn old_form_passes_over_what_it_does_not_know() {
        let lists = algorithms("ring,rings", OLD).unwrap();
        assert_eq!(lists.selected_for("AllReduce"), Some(&["Ring"][..]));
        assert_eq!(lists.dropped, ["rings"]);
        let lists = algorithms("allreduce:ring", OLD).unwrap();
        assert_eq!(lists.left_empty().len(), 5);
        let lists = algorithms("^tree", OLD).unwrap();
        assert_eq!(lists.selected_for("Reduce").unwrap().len(), 6);
        assert_eq!(algorithms("PAT", NcclVersion::v2(22, 3)).unwrap().dropped, ["PAT"]);
        assert_eq!(algorithms("NVLS", NcclVersion::v2(16, 5)).unwrap().dropped, ["NVLS"]);
    }

    #[test]
    fn tree_alone_leaves_the_other_collectives_without_algorithm() {
        let lists = algorithms("Tree", NEW).unwrap();
        assert_eq!(lists.left_without_algorithm(), ["Broadcast", "Reduce", "AllGather", "ReduceScatter"]);
        assert!(algorithms("allreduce:Tree", NEW).unwrap().left_without_algorithm().is_empty());
        assert!(algorithms("Ring", NEW).unwrap().left_without_algorithm().is_empty());
    }

    #[test]
    fn one_way_to_write_a_list() {
        let write = |text| canonical(Values::Algorithms, text);
        assert_eq!(
            write("AllReduce: ring, tree ; broadcast:RING;").as_deref(),
            Ok("allreduce:Ring,Tree;broadcast:Ring")
        );
        assert_eq!(write("^tree").as_deref(), Ok("^Tree"));
        assert_eq!(write("rings"), Err(ListError::Element("rings".into())));
        assert_eq!(canonical(Values::Protocols, "ll").as_deref(), Ok("LL"));
    }
}
