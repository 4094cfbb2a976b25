// @ts-check
// The view library, in one place: other modules import `html`, hooks and `Component` from here.

import { Component, Fragment, h, render } from "./vendor/preact.module.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.module.js";
import htm from "./vendor/htm.module.js";

/** Templates to elements. Text in them is always text: nothing in this page is parsed as HTML. */
export const html = /** @type {(strings: TemplateStringsArray, ...values: any[]) => any} */ (
  /** @type {any} */ (htm).bind(h)
);

/** Joins the names of classes that apply. */
export function classes(/** @type {any[]} */ ...names) {
  return names.filter(Boolean).join(" ");
}

export { Component, Fragment, render, useEffect, useLayoutEffect, useMemo, useRef, useState };
