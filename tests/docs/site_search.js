// SPDX-License-Identifier: Apache-2.0
// Runs the search of a built site, with its own scripts and index, without a browser.
//
//     node site_search.js SITE QUERY...
//
// prints one line of JSON per query: the addresses of the results, best first.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const element = () => ({ addEventListener() {}, appendChild: element, childNodes: [] });
const page = {
  document: {
    ...element(),
    readyState: "loading",
    documentElement: { dataset: { content_root: "./" } },
    getElementById: () => null,
    querySelector: () => null,
    querySelectorAll: () => [],
    createElement: element,
  },
  location: { search: "" },
  localStorage: { setItem() {}, getItem: () => null, removeItem() {} },
  console,
  URLSearchParams,
};
page.window = page;
vm.createContext(page);
// Sphinx 9 has stemmers in files of their own; older ones have them in language_data.js.
const scripts = [
  "_static/documentation_options.js",
  "_static/doctools.js",
  "_static/sphinx_highlight.js",
  "_static/base-stemmer.js",
  "_static/english-stemmer.js",
  "_static/language_data.js",
  "_static/searchtools.js",
  "searchindex.js",
  "_static/messages.js",
];
for (const script of scripts) {
  const file = path.join(site, script);
  if (!fs.existsSync(file)) continue;
  vm.runInContext(fs.readFileSync(file, "utf8"), page, { filename: script });
}
vm.runInContext("findMessages()", page); // as when a browser has loaded the page
page.queries = queries;
const found = vm.runInContext(
  "queries.map((query) => Search._performSearch(...Search._parseQuery(query)))",
  page,
);
// The script shows its results from the end of the list.
for (const results of found) {
  const addresses = results.reverse().map((result) => result[0] + result[2]);
  console.log(JSON.stringify(addresses));
}
