//! Which devices and ports are used: the syntax of NCCL_IB_HCA.
//!
//! Source of the syntax: NCCL's documentation of NCCL_IB_HCA. `^` in front excludes, `=` (after it)
//! compares whole names in place of prefixes, and then come names with an optional port, separated
//! by commas: `mlx5_0:1,mlx5_2`, `^=mlx5_3`. But where NCCL takes `mlx5_1` for `mlx5_10` too, as its documentation
//! warns, a number is whole here.

use std::fmt;

/// One name of the list, as it was written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The name, or what it begins with.
    pub name: String,
    /// The port; none stands for all.
    pub port: Option<u8>,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// A choice of devices and ports. The default chooses all.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Filter {
    exclude: bool,
    exact: bool,
    entries: Vec<Entry>,
}

impl Filter {
    /// Reads a list. A list without a name chooses all, whether it excludes or not.
    ///
    /// The error names the entry that cannot be used and what is allowed.
    pub fn parse(text: &str) -> std::result::Result<Filter, String> {
        let mut rest = text.trim();
        let mut take = |sign: char| match rest.strip_prefix(sign) {
            Some(r) => {
                rest = r.trim_start();
                true
            }
            None => false,
        };
        let exclude = take('^');
        let exact = take('=');
        let mut entries = Vec::new();
        for part in rest.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (name, port) = match part.split_once(':') {
                Some((name, port)) => (name.trim_end(), Some(port.trim_start())),
                None => (part, None),
            };
            let refused = |why: &str| {
                format!(
                    "{part:?}: {why}; allowed are names of devices separated by commas, each with \
                     an optional :port, and in front ^ to exclude them or = for whole names or both"
                )
            };
            if name.is_empty() {
                return Err(refused("no device is named"));
            }
            if name.starts_with(['^', '=']) {
                return Err(refused(
                    "^ and = stand once, in front of all names, as in ^=a,b",
                ));
            }
            let port = match port {
                None => None,
                Some(digits) => match digits.parse::<u8>() {
                    Ok(n) if n > 0 && digits.bytes().all(|b| b.is_ascii_digit()) => Some(n),
                    _ => return Err(refused("a port is a number from 1 to 255")),
                },
            };
            let name = name.to_owned();
            entries.push(Entry { name, port });
        }
        Ok(Filter {
            exclude,
            exact,
            entries,
        })
    }

    fn names(&self, entry: &Entry, device: &str) -> bool {
        if self.exact {
            device == entry.name
        } else {
            let digit = |c: char| c.is_ascii_digit();
            let rest = device.strip_prefix(entry.name.as_str());
            rest.is_some_and(|rest| !(entry.name.ends_with(digit) && rest.starts_with(digit)))
        }
    }

    fn hits(&self, entry: &Entry, device: &str, port: u8) -> bool {
        self.names(entry, device) && entry.port.is_none_or(|p| p == port)
    }

    /// Whether that port of that device is to be used.
    pub fn matches(&self, device: &str, port: u8) -> bool {
        let listed = self.entries.iter().any(|e| self.hits(e, device, port));
        self.entries.is_empty() || listed != self.exclude
    }

    /// Whether some port of that device may be used: one that has none need not be opened.
    pub fn may_match(&self, device: &str) -> bool {
        let named = |e: &&Entry| self.names(e, device);
        if self.entries.is_empty() {
            true
        } else if self.exclude {
            !self.entries.iter().filter(named).any(|e| e.port.is_none())
        } else {
            self.entries.iter().any(|e| named(&e))
        }
    }

    /// The entries that none of these ports matches: names written wrong, or devices gone.
    pub fn unmatched<'d>(
        &self,
        ports: impl IntoIterator<Item = (&'d str, u8)> + Clone,
    ) -> Vec<&Entry> {
        let missing = |e: &&Entry| {
            let mut ports = ports.clone().into_iter();
            !ports.any(|(device, port)| self.hits(e, device, port))
        };
        self.entries.iter().filter(missing).collect()
    }

    /// Whether the listed ones are those not to be used.
    pub fn excludes(&self) -> bool {
        self.exclude
    }

    /// What is listed.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.exclude { "^" } else { "" })?;
        f.write_str(if self.exact { "=" } else { "" })?;
        for (i, entry) in self.entries.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(f, "{comma}{entry}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn filter(text: &str) -> Filter {
        Filter::parse(text).unwrap()
    }

    #[test]
    fn nothing_listed_chooses_all() {
        for text in ["", "  ", "=", "^", "^=", ",", " , ,", "^,"] {
            assert!(filter(text).matches("mlx5_0", 1), "{text:?}");
            assert!(filter(text).may_match("mlx5_0"), "{text:?}");
            assert!(filter(text).entries().is_empty(), "{text:?}");
        }
        assert!(Filter::default().matches("mlx5_0", 1));
    }

    #[test]
    fn a_name_is_a_prefix() {
        let f = filter("mlx5_1");
        assert!(f.matches("mlx5_1", 1));
        assert!(f.matches("mlx5_1", 2));
        assert!(!f.matches("mlx5_0", 1));
        assert!(!f.matches("mlx5_", 1));
        assert!(!f.matches("xmlx5_1", 1));
        assert!(filter("mlx5").matches("mlx5_bond_0", 1));
        assert!(!filter("MLX5").matches("mlx5_0", 1));
    }

    #[test]
    fn a_number_is_whole() {
        for (entry, device, expected) in [
            ("mlx5_1", "mlx5_10", false),
            ("mlx5_1:2", "mlx5_10", false),
            ("mlx5_1", "mlx5_1_bond", true),
            ("mlx5", "mlx5_10", true),
            ("mlx", "mlx5_10", true),
            ("mlx5_", "mlx5_10", true),
            ("mlx5_10", "mlx5_1", false),
            ("rocep1", "rocep13s0", false),
            ("rocep1", "rocep1s0", true),
        ] {
            let f = filter(entry);
            assert_eq!(f.matches(device, 2), expected, "{entry} {device}");
            assert_eq!(f.may_match(device), expected, "{entry} {device}");
            let excluded = filter(&format!("^{entry}"));
            assert_eq!(excluded.matches(device, 2), !expected, "^{entry} {device}");
        }
    }

    #[test]
    fn an_equals_sign_takes_whole_names() {
        let f = filter("=mlx5_1");
        assert!(f.matches("mlx5_1", 1));
        assert!(!f.matches("mlx5_10", 1));
        assert!(!f.matches("mlx5_", 1));
        assert!(!filter("=mlx5").matches("mlx5_0", 1));
    }

    #[test]
    fn a_port_narrows_its_own_entry_only() {
        let f = filter("mlx5_0:1,mlx5_2");
        assert!(f.matches("mlx5_0", 1));
        assert!(!f.matches("mlx5_0", 2));
        assert!(f.matches("mlx5_2", 1) && f.matches("mlx5_2", 2));
        let f = filter("=mlx5_0:1,mlx5_0:2");
        assert!(f.matches("mlx5_0", 1) && f.matches("mlx5_0", 2));
        assert!(!f.matches("mlx5_0", 3));
        assert!(filter("mlx5_0:255").matches("mlx5_0", 255));
    }

    #[test]
    fn a_caret_excludes() {
        let f = filter("^mlx5_1");
        assert!(f.excludes());
        assert!(!f.matches("mlx5_1", 1) && f.matches("mlx5_10", 1));
        assert!(f.matches("mlx5_0", 1));
        let f = filter("^=mlx5_1,mlx5_3:2");
        assert!(!f.matches("mlx5_1", 1));
        assert!(f.matches("mlx5_10", 1));
        assert!(f.matches("mlx5_3", 1) && !f.matches("mlx5_3", 2));
    }

    #[test]
    fn devices_without_a_chosen_port_are_known_by_name() {
        assert!(filter("mlx5_0:2").may_match("mlx5_0"));
        assert!(!filter("mlx5_0:2").may_match("mlx5_1"));
        assert!(filter("^mlx5_0:2").may_match("mlx5_0"));
        assert!(!filter("^mlx5_0:2,mlx5_0").may_match("mlx5_0"));
        assert!(!filter("^=mlx5_1").may_match("mlx5_1"));
        assert!(filter("^=mlx5_1").may_match("mlx5_10"));
    }

    #[test]
    fn blanks_and_empty_parts_do_not_matter() {
        assert_eq!(filter(" ^ = a : 1 , ,b,"), filter("^=a:1,b"));
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        for (text, part) in [
            (":1", "\":1\""),
            ("a,:", "\":\""),
            ("a:", "\"a:\""),
            ("a:0", "\"a:0\""),
            ("a:256", "\"a:256\""),
            ("a:-1", "\"a:-1\""),
            ("a:+1", "\"a:+1\""),
            ("a:1:2", "\"a:1:2\""),
            ("a:x,b", "\"a:x\""),
            ("=^a", "\"^a\""),
            ("a,^b", "\"^b\""),
            ("==a", "\"=a\""),
        ] {
            let error = Filter::parse(text).unwrap_err();
            assert!(error.starts_with(part), "{text:?}: {error}");
            assert!(error.contains("allowed are"), "{error}");
        }
    }

    #[test]
    fn entries_that_match_nothing_are_told() {
        let ports = [("mlx5_0", 1), ("mlx5_10", 1), ("mlx5_10", 2)];
        let told = |text| {
            let f = filter(text);
            let told = f.unmatched(ports);
            told.iter().map(|e| e.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(told("mlx5_0,mlx5_1"), ["mlx5_1"]);
        assert_eq!(told("mlx5_0,mlx5_"), [""; 0]);
        assert_eq!(told("=mlx5_0,mlx5_1"), ["mlx5_1"]);
        assert_eq!(told("mlx5_0:2,mlx5_10:2"), ["mlx5_0:2"]);
        assert_eq!(told("^mlx4,mlx5"), ["mlx4"]);
        assert_eq!(told(""), [""; 0]);
        let f = filter("a,b:1");
        assert_eq!(f.unmatched(std::iter::empty()).len(), 2);
    }

    proptest! {
        #[test]
        fn no_text_panics(text in any::<String>(), device in any::<String>(), port in any::<u8>()) {
            if let Ok(f) = Filter::parse(&text) {
                prop_assert!(!f.matches(&device, port) || f.may_match(&device));
                f.unmatched([(device.as_str(), port)]);
            }
        }

        #[test]
        fn no_likely_text_panics(text in "[\\^= ,:a-c0-9_é-]{0,24}", port in any::<u8>()) {
            if let Ok(f) = Filter::parse(&text) {
                prop_assert!(!f.matches("a_1", port) || f.may_match("a_1"));
                prop_assert_eq!(Filter::parse(&f.to_string()).unwrap(), f);
            }
        }

        #[test]
        fn excluding_is_the_opposite(list in "[ab]{1,2}(:[12])?(,[ab]{1,2}(:[12])?){0,3}",
                                     device in "[ab]{1,3}", port in 1u8..4, exact in any::<bool>()) {
            let list = format!("{}{list}", if exact { "=" } else { "" });
            let with = filter(&list).matches(&device, port);
            let without = filter(&format!("^{list}")).matches(&device, port);
            prop_assert_ne!(with, without);
        }
    }
}
